"""Command line basics: exit codes, errors and `--debug`."""

from __future__ import annotations

import errno
import re
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Annotated

import forks
import pytest
import typer
from conftest import assert_one_line_error
from installed import SCRIPTS

from edgellm.core.cli import App, run_command
from edgellm.core.commands import entry_points
from edgellm.core.errors import EdgeLLMError


def _failing(error: Exception) -> App:
    app = App()

    @app.command()
    def fail(word: Annotated[str, typer.Option("--someWord")] = "") -> None:
        typer.echo(word)
        raise error

    return app


@pytest.fixture(autouse=True)
def own_streams(monkeypatch):
    """`run_command` is the last function of a process, and leaves its streams."""
    for name in ("stdin", "stdout", "stderr", "unraisablehook"):
        monkeypatch.setattr(sys, name, getattr(sys, name))


@pytest.fixture
def run(monkeypatch):
    def run(error: Exception, *arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["fail", *arguments])
        with pytest.raises(SystemExit) as stop:
            run_command(_failing(error))
        return stop.value.code

    return run


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")])
def test_too_little_memory_has_a_remedy(run, capsys, error):
    assert run(error) == 2
    message, hint = capsys.readouterr().err.splitlines()
    assert message == "error: out of memory"
    assert hint.startswith("hint: close other programs")


def test_a_full_disk_becomes_one_line(run, capsys):
    assert run(OSError(errno.ENOSPC, "No space left on device", "/x/model.weights")) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: No space left on device (/x/model.weights)",
        "hint: free some space or give another folder",
    ]


def test_no_temporary_folder_becomes_one_line(run, capsys, monkeypatch, tmp_path):
    """Python's error of that is a missing file without a name."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "none")])
    with pytest.raises(FileNotFoundError) as none:
        tempfile.gettempdir()
    assert run(none.value) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: no folder for temporary files can be written",
        "hint: set TMPDIR to a folder that can be written",
    ]


def test_surprises_become_one_line(run, capsys):
    assert run(RuntimeError("deep inside\nand more")) == 3
    assert "error: unexpected RuntimeError: deep inside\n" in capsys.readouterr().err


def test_a_huge_value_does_not_fill_the_terminal(run, capsys):
    assert run(EdgeLLMError("dtype " + "é" * 10**6 + " is unknown")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: dtype éé")
    assert line.endswith("é is unknown")
    assert len(line) < 3000


@pytest.mark.parametrize("arguments", [("--debug",), ("--some-word", "a", "--debug")])
def test_debug_keeps_the_traceback(monkeypatch, arguments):
    monkeypatch.setattr(sys, "argv", ["fail", *arguments])
    with pytest.raises(RuntimeError, match="deep inside"):
        run_command(_failing(RuntimeError("deep inside")))


def test_a_value_that_reads_like_debug_is_a_value(run, capsys):
    assert run(RuntimeError("deep inside"), "--some-word", "--debug") == 3
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ("llm_build", "--onnxDir", "{}", "--engineDir", ""),
        ("llm_build", "--onnx-dir", "", "--engine-dir", "{}"),
        ("llm_build", "--onnxDir", "{}", "--engineDir="),
        ("llm_inference", "--inputFile", "{}/in.json", "--engineDir", "{}", "--outputFile", ""),
        ("edgellm-export", "llm", "--model_dir", "", "--output_dir", "{}"),
        ("edgellm-serve", "--engineDir", ""),
    ],
)
def test_an_empty_path_is_not_the_current_folder(command_here, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    result = command_here(*(one.format(tmp_path) for one in arguments))
    assert_one_line_error(result, "the path is empty")
    assert list(tmp_path.iterdir()) == []


def test_every_command_offers_it(run, capsys):
    assert run(RuntimeError("never"), "--help") == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "--debug" in line]
    assert line.split(maxsplit=1) == ["--debug", "Show tracebacks of errors. Default: off."]


def test_an_interrupt_of_a_finalizer_is_not_lost():
    """Python ignores exceptions of `__del__`; the work would continue to its end."""
    code = (
        "import time; from edgellm.core.cli import run_command\n"
        "class Part:\n"
        "    def __del__(self):\n"
        "        print('finalizes', flush=True); time.sleep(0.3)\n"
        "def work():\n"
        "    part = Part(); del part; time.sleep(60)\n"
        "work.kept = ''\n"
        "run_command(work)\n"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", code], text=True, **pipes)
    assert process.stdout is not None
    assert process.stdout.readline() == "finalizes\n"
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=30)
    assert process.returncode == 130
    assert printed == "error: interrupted; nothing half-written was left\n"


# Presses Ctrl-C when the first of a command's modules is imported.
AT_THE_FIRST_IMPORT = """
import os, signal, sys
from edgellm.core.commands import entry_points
class Press:
    def find_spec(self, name, *_):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Press())
getattr(entry_points, sys.argv[1])()
"""


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_interrupt_while_a_command_is_imported(name):
    module, function = SCRIPTS[name].split(":")
    assert module == entry_points.__name__
    assert function in {command.replace("-", "_") for command in entry_points.MODULES}
    words = [sys.executable, "-c", AT_THE_FIRST_IMPORT, function]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (130, "")
    assert ended.stderr == "error: interrupted; nothing half-written was left\n"


NOTED = """
import sys, typer
from edgellm.core.cli import App, run_command
app = App()
@app.command()
def work() -> None:
    typer.echo("a note", err=True)
    print("another", file=sys.stderr, flush=True)
    with open(sys.argv[0] + ".done", "w") as done:
        typer.echo("a third", err=True)
        print("a fourth", file=sys.stderr, flush=True)
        done.write("done")
    raise typer.Exit(4)
run_command(app)
"""


@pytest.mark.parametrize(
    "redirection", ["2>&-", "2>&- >&- <&-", "2>/dev/full", "2>/dev/full >/dev/full", "2>&1 | exit"]
)
def test_notes_that_cannot_be_written_end_nothing(tmp_path, redirection):
    """Closed, full and broken streams: the work is done, and its files hold nothing else."""
    script, code = tmp_path / "work.py", tmp_path / "code"
    script.write_text(NOTED)
    work = f'{{ sleep 0.1; "{sys.executable}" "{script}"; echo $? >"{code}"; }}'
    subprocess.run(f"{work} {redirection}", shell=True, check=False, executable="/bin/bash")
    deadline = time.monotonic() + 300
    while not code.exists() or not code.read_text():  # a pipe's reader ends first
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert code.read_text() == "4\n"
    assert Path(f"{script}.done").read_text() == "done"


PRINTED = """
import sys, typer
from edgellm.core.cli import App, run_command
app = App()
@app.command()
def work(number: int = 1) -> None:
    print("printed")
    if number > 1:
        typer.echo("written" * number)
    with open(sys.argv[0] + ".done", "w") as done:
        done.write("done")
run_command(app)
"""


@pytest.mark.parametrize(
    ("redirection", "code", "error", "is_done"),
    [
        (">&-", 2, "standard output is closed: what the command printed is lost", True),
        (">&- <&-", 2, "standard output is closed: what the command printed is lost", True),
        (">/dev/full", 2, "No space left on device (standard output)", True),
        ("--number 2 >/dev/full", 2, "No space left on device (standard output)", False),
        ("--number 9999 | head -c 3", 1, "", False),
        ("--help >&-", 2, "standard output is closed: what the command printed is lost", False),
        ("--number x >&-", 2, "Invalid value for '--number'", False),
    ],
)
def test_lost_output_is_an_error(tmp_path, redirection, code, error, is_done):
    """Also where Python would write it after the command's end. A closed pipe has read enough."""
    script, ended = tmp_path / "work.py", tmp_path / "code"
    script.write_text(PRINTED)
    command, bar, reader = redirection.partition("|")
    work = f'{{ "{sys.executable}" "{script}" {command}; echo $? >"{ended}"; }} {bar} {reader}'
    result = subprocess.run(
        work, shell=True, capture_output=True, text=True, check=False, executable="/bin/bash"
    )
    assert ended.read_text() == f"{code}\n"
    lines = result.stderr.splitlines()
    assert [line[7 : 7 + len(error)] for line in lines if line[:7] == "error: "] == [error] * (
        error != ""
    )
    assert "Traceback" not in result.stderr
    assert "Exception ignored" not in result.stderr
    assert Path(f"{script}.done").exists() == is_done


def test_a_note_is_written_at_once(tmp_path):
    code = NOTED.replace("raise", "import os; os._exit(5)\n    raise")
    (tmp_path / "work.py").write_text(code)
    words = [sys.executable, str(tmp_path / "work.py")]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    assert result.returncode == 5
    assert result.stderr.splitlines() == ["a note", "another", "a third", "a fourth"]


@pytest.mark.parametrize(("before", "code"), [(signal.SIG_IGN, 4), (signal.SIG_DFL, 130)])
def test_a_hangup_that_nohup_ignores_stays_so(tmp_path, before, code):
    note = "import os, signal; os.kill(os.getpid(), signal.SIGHUP)\n    raise"
    (tmp_path / "work.py").write_text(NOTED.replace("raise", note))
    words = [sys.executable, str(tmp_path / "work.py")]
    prepare = partial(signal.signal, signal.SIGHUP, before)
    result = subprocess.run(words, capture_output=True, check=False, preexec_fn=prepare)
    assert result.returncode == code


@pytest.mark.parametrize("flag", ["--someWord", "--some_word", "--some-word", "--someword"])
def test_all_spellings_of_a_flag_work(run, capsys, flag):
    assert run(EdgeLLMError("x"), flag, "said") == 2
    assert run(EdgeLLMError("x"), f"{flag}=said") == 2
    assert capsys.readouterr().out == "said\nsaid\n"


@pytest.mark.parametrize(
    ("line", "fault", "hint"),
    [
        ("llm_inference --temprature 3", "No such option: --temprature", "--temperature?"),
        ("llm_inference --engine_dri=x", "No such option: --engine_dri", "--engineDir?"),
        ("llm_inference --max_tokens", "'--max_tokens' requires an argument", "--help lists"),
        ("llm_inference --inputFile /no", "Missing option '--engineDir'", "--help lists"),
        ("llm_inference --engineDir x --inputFile /no --outputFile y", "cannot read /no", "a JSON"),
        ("llm_inference --engineDir x --prompt y --spec egle", "--spec egle: give", "eagle?"),
        ("llm_build --max-kv-cache-capacity x", "'--maxKVCacheCapacity'", "--help lists"),
        ("llm_build --backend tensort --onnxDir x --engineDir y", "'tensort'", "tensorrt?"),
        ("edgellm-export vsual", "No such command 'vsual'", "visual?"),
        ("edgellm-export llm --model_dir x --output_dir y --dtype fp23", "fp16 or fp32", "fp32?"),
        (
            "edgellm-export llm --model_dir x --output_dir y --dtype bf16",
            "fp16 or fp32",
            "range of",
        ),
        ("edgellm-serve --engineDir x --generation_config modle", "'modle' is not one", "model?"),
        ("edgellm-bench --engineDir x --output jsn", "--output jsn: give", "json?"),
    ],
)
def test_what_was_meant_is_in_the_hint(command_here, line, fault, hint):
    name, *words = line.split()
    result = command_here(name, *words)
    assert result.returncode == 2
    assert_one_line_error(result, fault)
    last = result.stderr.splitlines()[-1]
    assert last.startswith("hint: ")
    assert hint in last


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("float16", "fp16"), ("half", "fp16"), ("fp32", "fp32"), ("float32", "fp32")],
)
def test_types_have_the_names_of_other_programs(
    command_here, tiny_checkpoint, tmp_path, name, dtype
):
    flags = ("--model-dir", tiny_checkpoint, "--outputDir", tmp_path / "out", "--dtype", name)
    result = command_here("edgellm-export", "llm", *flags)
    assert result.returncode == 0, result.stderr
    assert f"parameters, {dtype}, " in result.stdout


@pytest.mark.parametrize(
    "line",
    [
        "llm_inference --help",
        "llm_inference --engineDir nowhere --inputFile in.json --outputFile out.json",
        "edgellm-trees trees.json --output page.html",
        "edgellm-export llm --model_dir {checkpoint} --output_dir bundle --dtype fp32",
    ],
)
def test_forks_end_as_processes_do(tmp_path, tiny_checkpoint, monkeypatch, line):
    """The tests' forks of commands print, write and end as the commands of a user."""
    name, *arguments = line.format(checkpoint=tiny_checkpoint).split()
    found = []
    for folder in ("process", "fork"):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        if folder == "fork":
            ended = forks.shared().run(name, *arguments)
        else:
            script = Path(sys.executable).parent / name
            ended = subprocess.run(
                [script, *arguments], capture_output=True, text=True, check=False
            )
        names = sorted(path.as_posix() for path in Path().rglob("*"))
        figures = re.compile(r"[\d.]+ (s|ms)\b")
        found.append((ended.returncode, figures.sub("", ended.stdout), ended.stderr, names))
    assert found[0] == found[1]


def test_a_signal_ends_a_fork(tiny_engine):
    fork = forks.shared().start("edgellm-chat", "--engineDir", tiny_engine, is_read=True)
    assert fork.wait(60) == 0  # its stdin is empty
    assert fork.poll() == 0
