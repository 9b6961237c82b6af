"""Help of all commands: groups, sentences, defaults and examples."""

from __future__ import annotations

import re
import shlex

import pytest
import typer
from installed import ROOT
from typer.testing import CliRunner

from edgellm.core.command_help import COMMON, GROUPS, REST, group_flags
from edgellm.core.commands.entry_points import MODULES
from edgellm.core.errors import fold_name
from edgellm.scripts.site.flags import commands

APPS = dict(commands((ROOT / "pyproject.toml").read_text("utf-8")))
_LIMIT = 25  # words of a sentence


def _groups(name: str) -> dict[str, list[tuple[str, str]]]:
    command = APPS[name]
    return group_flags(command, typer.Context(command, info_name=name), command.common_flags)


@pytest.mark.parametrize("name", APPS)
def test_no_two_flags_differ_by_spelling_alone(name):
    flags = [{*map(fold_name, (*one.opts, *one.secondary_opts))} for one in APPS[name].params]
    assert len(set.union(*flags)) == sum(map(len, flags))


@pytest.mark.parametrize("name", APPS)
def test_flags_are_grouped(name):
    """The common ones are first, at most five, and all of them exist."""
    groups = _groups(name)
    assert list(groups) == [group for group in GROUPS if group in groups]
    assert next(iter(groups)) == COMMON
    assert len(groups[COMMON]) == len(APPS[name].common_flags) <= 5
    rest = {flag for flag, _ in groups[REST]}
    assert rest <= {"--install-completion", "--show-completion", "--help"}


@pytest.mark.parametrize("name", APPS)
def test_every_flag_is_described_by_sentences_that_end_with_the_default(name):
    for group, rows in _groups(name).items():
        for flag, text in rows if group != REST else ():
            *sentences, last = re.split(r"(?<=\.) ", text)
            assert re.fullmatch(r"Required\.|Default: .+\.", last), (flag, text)
            assert sentences, flag
            for sentence in sentences:
                # Words of the value's grammar, such as cpu or ngram, may begin a sentence.
                assert re.fullmatch(r"\w.*\.", sentence, re.DOTALL), (flag, sentence)
                assert len(sentence.split()) <= _LIMIT, (flag, sentence)
            assert sentences[0][0].isupper(), (flag, text)
            assert "{" not in last, (flag, text)


@pytest.mark.parametrize("name", APPS)
def test_the_help_ends_with_two_examples_that_parse(name):
    command = APPS[name]
    examples = command.epilog.splitlines()
    assert len(examples) == len(set(examples)) == 2
    for example in examples:
        words = shlex.split(example)
        count = len(name.split())
        assert " ".join(words[:count]) == name
        command.make_context(name, words[count:])  # raises the error that a user would get
    shown = CliRunner().invoke(typer_app(name), [*name.split()[1:], "--help"])
    ending = "\nExamples:\n" + "".join(f"  {example}\n" for example in examples)
    assert shown.output.endswith(ending)


@pytest.mark.parametrize("script", sorted({name.split()[0] for name in APPS if " " in name}))
def test_a_group_of_commands_shows_examples_of_two(script):
    shown = CliRunner().invoke(typer_app(script), ["--help"]).output
    examples = shown.partition("\nExamples:\n")[2].splitlines()
    assert len(examples) == 2
    for example in examples:
        words = shlex.split(example)
        APPS[" ".join(words[:2])].make_context(script, words[2:])


def typer_app(name: str) -> typer.Typer:
    import importlib

    return importlib.import_module(MODULES[name.split()[0]]).app
