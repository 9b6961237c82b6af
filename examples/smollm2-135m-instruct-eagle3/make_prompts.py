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

from word_lists import JOBS, NAMES, OPERATIONS, PLACES, TASKS, THINGS, TOPICS

DIALOGUES = ("chitchat-dataset==0.9.0", "chatterbot-corpus==1.3.3")
SHARES = {"task": 4200, "docstring": 1300, "exercise": 1300, "sum": 1000, "dialogue": 1200}


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
    for _ in range(9000):
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
    for _ in range(6000):
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
            hint = {"list": "List[int]", "str": "str", "int": "int"}[kind]
            if chance.random() < 0.25:
                yield f"Write a Python function `{full}` that takes {_KINDS[kind]} and must {said}."
            else:
                yield (
                    "from typing import List\n\n\n" * (kind == "list")
                    + f'def {full}(value: {hint}):\n    """ Given {_KINDS[kind]}, {said}.\n'
                    + "".join(lines)
                    + '    """\n'
                )


_KINDS = {"list": "a list of numbers", "str": "a string", "int": "a positive integer"}


def _example(kind: str, chance: random.Random) -> object:
    if kind == "list":
        return [chance.randint(-9, 30) for _ in range(chance.randint(3, 6))]
    if kind == "int":
        return chance.randint(2, 40)
    return " ".join(chance.choice(THINGS) for _ in range(chance.randint(1, 3)))


def _sums(chance: random.Random) -> Iterator[str]:
    """Word problems in two or three steps."""
    for _ in range(4000):
        name, other = chance.sample(NAMES, 2)
        thing, second = chance.sample(THINGS, 2)
        a, b, c = chance.randint(2, 20), chance.randint(2, 12), chance.randint(2, 9)
        yield chance.choice(_PROBLEMS).format(
            name=name, other=other, thing=thing, second=second, a=a, b=b, c=c, total=a * b + c,
            job=chance.choice(JOBS), place=chance.choice(PLACES),
        )  # fmt: skip


_PROBLEMS = (
    "{name} buys {a} boxes with {b} {thing}s each and gives {c} {thing}s to {other}. "
    "How many {thing}s does {name} have left?",
    "A {job} in {place} works {a} hours a day for {b} days and earns ${c} an hour. "
    "How much money does the {job} earn in total?",
    "{name} had {total} {thing}s. {other} took {c} of them, and the rest were put into {b} bags "
    "equally. How many {thing}s are in each bag?",
    "Each {thing} costs ${c} and each {second} costs ${b}. {name} buys {a} {thing}s and {c} "
    "{second}s. How much does {name} pay?",
    "{name} is {a} years older than {other}. In {b} years {name} will be {c} times as old as "
    "{other} was {b} years ago. Explain how to find {other}'s age.",
    "A train travels {a} miles in the first hour and {b} miles more in every following hour. How "
    "far has it gone after {c} hours?",
    "{name} reads {a} pages on Monday, twice as many on Tuesday and {b} fewer on Wednesday than on "
    "Tuesday. How many pages did {name} read in these three days?",
    "There are {total} people in {place}. {b} of them own a {thing} and {c} own a {second}. What "
    "is the probability that a person picked at random owns a {thing}?",
    "Solve for x: {a}x + {b} = {total}. Show every step.",
    "If f(x) = {a}x^2 - {b}x + {c}, what is f({c})?",
    "A rectangle is {a} cm long and {b} cm wide. What are its area and its perimeter?",
    "{name} saves ${a} every week. A {thing} costs ${total}. After how many weeks can {name} buy "
    "it, if {other} adds ${c} at the start?",
)


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
