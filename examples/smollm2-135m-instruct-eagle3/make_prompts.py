"""The prompts this draft was trained on: `python make_prompts.py prompts.jsonl`.

Drawn from the templates and topics below, from docstrings of Python's standard library, and from
two packages of dialogues (chitchat-dataset, chatterbot-corpus). No prompt of MT-bench, HumanEval
or gsm8k is among them: those three only measure. Only prompts come from here: every answer that
the draft learned from is the base model's own.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import random
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from word_lists import JOBS, NAMES, OPERATIONS, PAIRED, PLACES, PROBLEMS, TASKS, THINGS, TOPICS

DIALOGUES = ("chitchat-dataset==0.9.0", "chatterbot-corpus==1.3.3")
SHARES = {
    "task": 14000,
    "docstring": 1300,
    "exercise": 6500,
    "paired": 6500,
    "sum": 11000,
    "dialogue": 3000,
}


def main() -> None:
    """Write one {"messages": [...]} a line, shuffled with a fixed seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    output = parser.parse_args().output
    chance = random.Random(20261121)
    makers: dict[str, Callable[[random.Random], Iterator[str]]] = {
        "task": _tasks,
        "docstring": _docstrings,
        "exercise": _exercises,
        "paired": _paired_exercises,
        "sum": _sums,
        "dialogue": _dialogues,
    }
    prompts: list[str] = []
    for name, count in SHARES.items():
        unique = list(dict.fromkeys(makers[name](chance)))
        prompts += chance.sample(unique, min(count, len(unique)))
        print(f"{name}: {min(count, len(unique))} of {len(unique)}")
    chance.shuffle(prompts)
    with output.open("w", encoding="utf-8") as stream:
        for prompt in prompts:
            stream.write(json.dumps({"messages": [{"role": "user", "content": prompt}]}) + "\n")


def _tasks(chance: random.Random) -> Iterator[str]:
    for _ in range(16000):
        topic, other = chance.sample(TOPICS, 2)
        yield chance.choice(TASKS).format(
            topic=topic, other=other, job=chance.choice(JOBS), place=chance.choice(PLACES),
            name=chance.choice(NAMES), thing=chance.choice(THINGS), n=chance.randint(2, 10),
        )  # fmt: skip


def _docstrings(chance: random.Random) -> Iterator[str]:
    """Head and docstring of functions, as a completion task or as an order."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    for path in files:
        source = path.read_text("utf-8", errors="replace")
        for node in ast.walk(ast.parse(source)):
            text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if not text or not 40 <= len(text) <= 500 or node.name.startswith("__"):
                continue
            head = f"def {node.name}({ast.unparse(node.args)}):"
            indented = text.replace("\n", "\n    ")
            if chance.random() < 0.7:
                yield f'{head}\n    """{indented}\n    """\n'
            else:
                yield f"Write a Python function {node.name}: {text.splitlines()[0]}"


def _exercises(chance: random.Random) -> Iterator[str]:
    """Small typed functions with worked examples, the examples computed."""
    for _ in range(10000):
        name, kind, words, work = chance.choice(OPERATIONS)
        other_name, other_kind, other_words, other_work = chance.choice(OPERATIONS)
        chained = other_kind == kind != "int" and other_name != name and chance.random() < 0.7
        full = f"{name}_then_{other_name}" if chained else name
        lines = []
        for _ in range(chance.randint(1, 3)):
            value = _example(kind, chance)
            try:
                first = work(value)
                result = other_work(first) if chained else first
            except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError):
                break
            lines.append(f"    >>> {full}({value!r})\n    {result!r}\n")
        else:
            said = f"{words}, then {other_words}" if chained else words
            hint = _HINTS[kind]
            if chance.random() < 0.25:
                yield f"Write a Python function `{full}` that takes {_KINDS[kind]} and must {said}."
            else:
                yield (
                    "from typing import List\n\n\n" * (kind == "list")
                    + f'def {full}(value: {hint}):\n    """ Given {_KINDS[kind]}, {said}.\n'
                    + "".join(lines)
                    + '    """\n'
                )


def _paired_exercises(chance: random.Random) -> Iterator[str]:
    """Small functions of two arguments, written in several ways, the examples computed."""
    for _ in range(10000):
        name, kind, second, words, work = chance.choice(PAIRED)
        first = chance.choice(_PARAMETERS[kind])
        order = words.format(f"`{second}`" if chance.random() < 0.5 else second)
        calls = []
        for _ in range(chance.randint(1, 3)):
            value, number = _example(kind, chance), chance.randint(2, 9)
            calls.append((f"{name}({value!r}, {number})", repr(work(value, number))))
        head = f"def {name}({first}: {_HINTS[kind]}, {second}: int)"
        style = chance.random()
        if style < 0.2:
            call, result = calls[0]
            yield (
                f"Write a Python function `{name}({first}, {second})` for {_KINDS[kind]} and an "
                f"integer. It must {order}. For example, `{call}` returns `{result}`."
            )
        elif style < 0.6:
            shown = "".join(f"    >>> {call}\n    {result}\n" for call, result in calls)
            imports = "from typing import List\n\n\n" if kind == "list" else ""
            yield f'{imports}{head}:\n    """ Of {first}, {order}.\n{shown}    """\n'
        else:
            shown = "".join(f"    {call} -> {result}\n" for call, result in calls)
            text = f"    Given {_KINDS[kind]} {first} and an integer {second}, {order}.\n"
            whole = f"    {_QUOTES}\n{text}\n    Examples:\n{shown}    {_QUOTES}\n"
            yield f"def {name}({first}, {second}):\n{whole}"


_QUOTES = "'" * 3
_HINTS = {"list": "List[int]", "str": "str", "int": "int"}
_PARAMETERS = {
    "list": ("values", "items", "numbers", "data", "scores"),
    "str": ("text", "words", "line", "message"),
    "int": ("value", "n", "amount", "number"),
}
_KINDS = {"list": "a list of numbers", "str": "a string", "int": "a positive integer"}


def _example(kind: str, chance: random.Random) -> object:
    if kind == "list":
        return [chance.randint(-9, 30) for _ in range(chance.randint(3, 6))]
    if kind == "int":
        return chance.randint(2, 40)
    return " ".join(chance.choice(THINGS) for _ in range(chance.randint(1, 3)))


def _sums(chance: random.Random) -> Iterator[str]:
    """Word problems in two or three steps."""
    for _ in range(12000):
        name, other = chance.sample(NAMES, 2)
        thing, second = chance.sample(THINGS, 2)
        a, b, c = chance.randint(2, 20), chance.randint(2, 12), chance.randint(2, 9)
        yield chance.choice(PROBLEMS).format(
            name=name, other=other, thing=thing, second=second, a=a, b=b, c=c, total=a * b + c,
            triple=3 * a, stock=a * (b + 1) + c, job=chance.choice(JOBS),
            place=chance.choice(PLACES),
        )  # fmt: skip


def _dialogues(_: random.Random) -> Iterator[str]:
    """First messages of conversations, and the questions of short dialogues."""
    import yaml

    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        subprocess.run([*pip, *DIALOGUES], check=True)
        for path in sorted(Path(folder).glob("*.whl")):
            with zipfile.ZipFile(path) as wheel:
                for member in sorted(wheel.namelist()):
                    if member.endswith("chitchat_dataset/dataset.json"):
                        yield from _chitchat(json.loads(wheel.read(member)))
                    elif "/english/" in member and member.endswith(".yml"):
                        talks = yaml.safe_load(io.BytesIO(wheel.read(member)))["conversations"]
                        yield from (str(talk[0]) for talk in talks if len(str(talk[0])) > 12)


def _chitchat(conversations: dict) -> Iterator[str]:
    for talk in conversations.values():
        first = " ".join(line["text"] for line in talk["messages"][0])
        if 12 <= len(first) <= 400:
            yield first


if __name__ == "__main__":
    main()
