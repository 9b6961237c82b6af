"""Hostile programs: each ends in time with a reason and leaves no process or file."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from edgellm.core.errors import EdgeLLMError
from edgellm.tools.evaluate.datasets.questions import load
from edgellm.tools.evaluate.scoring.humaneval import program
from edgellm.tools.evaluate.scoring.sandbox import Limits, Sandbox, open_sandbox

LIMITS = Limits(seconds=1, memory_bytes=256 << 20, file_bytes=1 << 20)
FORKS = """
import os, time
children = 0
try:
    while children < 500:
        if os.fork() == 0:
            time.sleep(60)
        children += 1
except OSError as error:
    raise SystemExit(f"{children} children")
"""


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return open_sandbox(LIMITS)


@pytest.fixture(scope="module")
def bare() -> Sandbox:
    """A sandbox without `unshare`."""
    sandbox = Sandbox(LIMITS, is_shielded=False)
    if not sandbox.run("pass").passed:
        pytest.skip("the user nobody cannot run this Python")
    return sandbox


@pytest.mark.parametrize("name", ["sandbox", "bare"])
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("while True: pass", "TimeoutError: more than 1 s"),
        ("import time; time.sleep(60)", "TimeoutError: more than 1 s"),
        ("rows = []\nwhile True: rows.append(bytes(10**7))", "MemoryError"),
        ("open('a', 'wb').write(bytes(2 * 10**6))", "File too large"),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("import os; os._exit(0)", "it ended before its test did"),
        ("import ctypes; ctypes.string_at(0)", ""),
        ("import os\nif os.fork():\n    raise ValueError('parent')", "ValueError: parent"),
        ("assert 1 == 2", "AssertionError"),
        ("def f(:", "SyntaxError"),
        ("import numpy", "No module named 'numpy'"),
        (
            'import os\nfor fd in range(3, 64):\n  try: os.write(fd, b\'["x", ""]\')\n'
            "  except OSError: pass\nos._exit(0)",
            "it ended before its test did",
        ),
    ],
)
def test_failing_programs_give_a_reason(request, name, source, reason):
    begin = time.monotonic()
    outcome = request.getfixturevalue(name).run(source)
    assert not outcome.passed
    assert outcome.reason
    assert reason in outcome.reason
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize("name", ["sandbox", "bare"])
@pytest.mark.parametrize(
    "source",
    [
        "pass",
        "print('loud' * 10**5)",
        "import sys; sys.stderr.write('loud'); sys.stdin.read()",
        "open('a', 'w').write('x'); assert open('a').read() == 'x'",
        "import os; assert os.listdir('.') == []",
        "import hashlib, math, typing, re, itertools",
    ],
)
def test_programs_without_errors_pass(request, name, source):
    outcome = request.getfixturevalue(name).run(source)
    assert outcome.passed, outcome.reason


def test_a_fork_bomb_is_bounded(sandbox):
    outcome = sandbox.run(FORKS)
    assert not outcome.passed
    assert "children" in outcome.reason or "TimeoutError" in outcome.reason
    if os.geteuid() == 0:  # then the user `nobody` runs only the program
        assert int(outcome.reason.split()[1]) <= LIMITS.processes


def test_child_processes_end_with_the_program(sandbox):
    if not sandbox.is_shielded:
        pytest.skip("unshare is not allowed here")
    marker = f"edgellm-{time.time_ns()}"
    source = (
        "import os, sys, time\nif os.fork() == 0:\n    os.setsid()\n"
        f"    os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(60)', "
        f"'{marker}'])\ntime.sleep(0.3)"
    )
    assert sandbox.run(source).passed
    deadline = time.monotonic() + 60
    while any(marker in _command(path) for path in Path("/proc").glob("[0-9]*/cmdline")):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _command(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""


def test_a_shielded_program_cannot_write_files_or_use_the_network(sandbox, tmp_path):
    if not sandbox.is_shielded:
        pytest.skip("unshare is not allowed here")
    tmp_path.chmod(0o777)
    target = tmp_path / "evil"
    assert "Read-only file system" in sandbox.run(f"open({str(target)!r}, 'w')").reason
    assert not target.exists()
    calls = "import socket; socket.create_connection(('127.0.0.1', 9), 1)"
    assert "unreachable" in sandbox.run(calls).reason
    undo = "import ctypes; assert ctypes.CDLL(None).mount(b'x', b'/', b'tmpfs', 0, 0) == 0"
    assert not sandbox.run(undo).passed
    fill = "for n in range(99): open(str(n), 'wb').write(bytes(10**5))"
    assert "No space left" in sandbox.run(fill).reason


def test_a_machine_without_sandbox_is_an_error(monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(EdgeLLMError, match="no program runs in the sandbox") as caught:
        open_sandbox(LIMITS)
    assert caught.value.hint == "leave out --runCode"


@pytest.mark.parametrize(
    "answer",
    [
        "    return a + b\n",
        "return a + b",
        "    return a + b\n\nHere is why it works: it adds.",
        "Sure!\n```python\ndef add(a, b):\n    return a + b\n```\nDone.",
        "```\nfrom os import sep\n\ndef add(a, b):\n    return int(math.fsum([a, b]))\n```",
        "```python\nprint(add(1, 2))\n```\nno:\n```python\ndef add(a, b):\n    return a + b\n```",
        "```python\n    return a + b\n```",
        "```python\ndef add(a, b):\n    return a + b",
        "def add(a, b):\n    return a + b\n",
    ],
)
def test_correct_answers_in_all_formats_pass(sandbox, answer):
    prompt = 'import math\n\n\ndef add(a, b):\n    """Add."""\n'
    test = "def check(candidate):\n    assert candidate(2, 3) == 5\n"
    source = program(prompt, answer, "add", test)
    assert sandbox.run(source).passed, source
    assert not sandbox.run(source.replace("== 5", "== 6")).passed


@pytest.mark.parametrize("answer", ["", "I cannot do that.", "```python\npass\n```"])
def test_an_answer_without_code_fails(sandbox, answer):
    test = "def check(candidate):\n    assert candidate() == 1\n"
    assert not sandbox.run(program('def one():\n    """One."""\n', answer, "one", test)).passed


def test_humaneval_accepts_only_correct_programs(sandbox):
    from edgellm.tools.evaluate.datasets.packages import HUMANEVAL, find, read_rows

    rows = read_rows(find(HUMANEVAL))
    for row, question in list(zip(rows, load("humaneval", None), strict=True))[::41]:
        parts = question.turns[0], question.entry_point, question.test
        right = program(parts[0], row["canonical_solution"], *parts[1:])
        assert sandbox.run(right).passed
        assert not sandbox.run(program(parts[0], "    return None\n", *parts[1:])).passed
