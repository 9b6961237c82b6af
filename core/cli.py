"""Command line basics: `--debug`, errors as one line with a hint on stderr, exit codes."""

from __future__ import annotations

import errno
import functools
import importlib
import inspect
import io
import itertools
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from edgellm.core.command_help import group_flags
from edgellm.core.commands.entry_points import (
    INTERRUPTED_CODE,
    NOTHING_HALF_WRITTEN,
    collect_garbage,
)
from edgellm.core.commands.plain_values import read_plainly
from edgellm.core.errors import EdgeLLMError, fold_name, suggestion

_NO_CHOICE = re.compile("'([^']*)' is not one of (.*)")
_UsageError: Any = typer.BadParameter.__base__  # of click, which new versions of typer contain
_MAX_MESSAGE = 2000  # characters
_COMPLETION = ("install_completion", "show_completion")  # parameters that typer adds
_AGAIN_S = 0.01  # after which an interrupt comes again
_DEBUG = inspect.Parameter(
    "debug",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool, typer.Option("--debug", help="Show tracebacks of errors.", rich_help_panel="Debug")
    ],
)
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite",
        help="Replace what edgellm wrote to the output folder by another command or from other "
        "inputs. Other files stay.",
        rich_help_panel="Output",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subcommand:
    """A subcommand in a module of its own, which is imported when the subcommand is used."""

    module: str  # its `app` is the subcommand, or has it
    help: str
    panel: str  # of the help
    example: str = ""  # for the help of all
    is_alias: bool = False  # of a command that also has a name of its own


class _Group(TyperGroup):
    """Subcommands; the help ends with the first examples of two of them."""

    owner: App

    def get_params(self, ctx: Any) -> list[Any]:
        """Parameters, whose plain values are read without pydantic."""
        return read_plainly(super().get_params(ctx))

    def list_commands(self, ctx: Any) -> list[str]:
        """Names, in the order of the help."""
        return [*self.owner.subcommands, *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a subcommand that lies in another module."""
        found = self.owner.subcommands.get(cmd_name)
        if found is None:
            return super().get_command(ctx, cmd_name)
        app: App = importlib.import_module(found.module).app
        self.owner.imported.append(app)
        command = typer.main.get_command(app)
        command = getattr(command, "commands", {}).get(cmd_name, command)
        command.params = [one for one in command.params if one.name not in _COMPLETION]
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the subcommands by panel, without importing them."""
        if not self.owner.subcommands:
            super().format_commands(ctx, formatter)
            return
        for panel in dict.fromkeys(one.panel for one in self.owner.subcommands.values()):
            with formatter.section(panel):
                named = self.owner.subcommands.items()
                formatter.write_dl([(name, one.help) for name, one in named if one.panel == panel])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a subcommand; an unknown one gets a suggestion."""
        try:
            return super().resolve_command(ctx, args)
        except _UsageError as error:
            names = self.list_commands(ctx)
            words = (suggestion(args[0], names), f"commands: {', '.join(names)}")
            message = error.format_message().partition(". Did you mean")[0].rstrip(".")
            raise EdgeLLMError(message, hint=" ".join(filter(None, words))) from None

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - of typer
        """Write the examples as they are, unwrapped."""
        imported = self.commands.values()
        examples = [one.example for one in self.owner.subcommands.values()]
        examples += [(one.epilog or "").split("\n")[0] for one in imported]
        _write_examples(formatter, [*filter(None, examples)][:2])


class App(typer.Typer):
    """A command line; each command takes `--debug`, which `run_command` handles."""

    def __init__(
        self,
        *,
        no_args_is_help: bool = False,
        subcommands: Mapping[str, Subcommand] | None = None,
    ) -> None:
        """Make an app without commands.

        Args:
            no_args_is_help: whether the bare command shows the help.
            subcommands: those in modules of their own, by name.
        """
        self.subcommands = subcommands or {}
        self.imported: list[App] = []  # apps of subcommands
        super().__init__(
            cls=type("Group", (_Group,), {"owner": self}),
            add_completion=True,
            rich_markup_mode=None,
            pretty_exceptions_enable=False,
            no_args_is_help=no_args_is_help,
            # Users may spell --maxInputLen as --max_input_len or --max-input-len.
            context_settings={"token_normalize_func": fold_name},
        )
        self._shows_tracebacks = False
        self._kept = ""

    @property
    def shows_tracebacks(self) -> bool:
        """Whether `--debug` was given, to this command or a subcommand."""
        return self._shows_tracebacks or any(app.shows_tracebacks for app in self.imported)

    @property
    def kept(self) -> str:
        """What an interrupted command keeps; "": nothing to say."""
        return self._kept or next((app.kept for app in self.imported if app.kept), "")

    @kept.setter
    def kept(self, what: str) -> None:
        self._kept = what

    def command(
        self,
        name: str | None = None,
        *,
        common: Sequence[str] = (),
        examples: Sequence[str] = (),
        **settings: Any,
    ) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """A decorator that adds a command and returns the function, as typer's does.

        Args:
            name: of a subcommand; by default the function's.
            common: the flags that the help lists first.
            examples: command lines at the end of the help.
            settings: of `typer.Typer.command`.
        """

        def register(function: Callable[..., None]) -> Callable[..., None]:
            self._add(function, name, common, {"epilog": "\n".join(examples), **settings})
            return function

        return register

    def _add(
        self, function: Callable[..., None], name: str | None, common: Sequence[str], settings: Any
    ) -> None:
        command = self._with_debug(function)
        hints = command.__annotations__.items()
        paths = {key for key, hint in hints if "Path" in str(hint) or "_dir" in key}

        class Command(TyperCommand):
            common_flags = tuple(common)

            def get_params(self, ctx: Any) -> list[Any]:
                """Parameters, whose plain values are read without pydantic."""
                return read_plainly(super().get_params(ctx))

            def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
                """Reject empty paths, which `Path` takes as the current folder."""
                params = [one for one in self.params if one.name in paths]
                flags = {fold_name(flag) for one in params for flag in one.opts}
                for flag, value in itertools.zip_longest(args, args[1:]):
                    name, equals, rest = flag.partition("=")
                    known = name.startswith("--") and fold_name(name) in flags
                    if known and (rest if equals else value) == "":
                        raise EdgeLLMError(f"{name}: the path is empty", hint="give a path")
                given = [*args]
                try:
                    return super().parse_args(ctx, args)
                except _UsageError as error:
                    raise _usage_error(error, self, ctx, given) from None

            def format_options(self, ctx: Any, formatter: Any) -> None:
                """Write the flags by group; typer does so with rich only, which is slow."""
                for group, rows in group_flags(self, ctx, common).items():
                    with formatter.section(group):
                        formatter.write_dl(rows)

            def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - of typer
                """Write the examples as they are, unwrapped."""
                _write_examples(formatter, (self.epilog or "").splitlines())

        super().command(name, cls=Command, **settings)(command)

    def _with_debug(self, function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(*, debug: bool, **given: Any) -> None:
            self._shows_tracebacks = debug
            collect_garbage()
            function(**given)

        own = inspect.signature(function, eval_str=True).parameters.values()
        return _with_parameters(command, [*own, _DEBUG])


def _usage_error(error: Any, command: Any, ctx: Any, given: Sequence[str]) -> EdgeLLMError:
    """A fault in a command line as one line, with the name or value that was probably meant."""
    message = " ".join(error.format_message().split()).rstrip(".").replace("Value error, ", "")
    meant = ""
    option = getattr(error, "option_name", "") or ""  # folded
    names = (word.partition("=")[0] for word in given if word.startswith("-"))
    name = next((one for one in names if fold_name(one) == fold_name(option)), option)
    if hasattr(error, "possibilities"):  # an unknown flag
        message = f"No such option: {name}"
        flags = [flag for one in command.params for flag in (*one.opts, *one.secondary_opts)]
        meant = suggestion(name, (flag for flag in flags if flag.startswith("--")))
    elif match := _NO_CHOICE.search(message):
        meant = suggestion(match[1], re.findall("'(.*?)'", match[2]))
    elif option:
        message = message.replace(option, name)
    help_line = f"{ctx.command_path} --help lists the flags"
    return EdgeLLMError(message, hint=" ".join(filter(None, (meant, help_line))))


def _write_examples(formatter: Any, lines: Iterable[str]) -> None:
    if shown := [f"  {line}\n" for line in lines if line]:
        formatter.write("".join(["\nExamples:\n", *shown]))


def _with_parameters(
    command: Callable[..., None], parameters: Iterable[inspect.Parameter]
) -> Callable[..., None]:
    """The command with these parameters, by keyword, as typer shall see them."""
    merged = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]
    command.__signature__ = inspect.Signature(merged)  # type: ignore[attr-defined]  # typer reads it
    command.__annotations__ = {one.name: one.annotation for one in merged}
    return command


def with_flags(
    parameter: str, kind: type[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator of commands, which puts the fields of a dataclass in place of a parameter.

    Args:
        parameter: the command's, which receives the dataclass.
        kind: the dataclass; its fields are annotated as typer's flags.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters
        flags = inspect.signature(kind, eval_str=True).parameters

        @functools.wraps(command)
        def taking(**given: Any) -> None:
            values = {name: given.pop(name) for name in flags if name in given}
            command(**{parameter: kind(**values)}, **given)

        merged: list[inspect.Parameter] = []
        for name, one in own.items():
            merged += flags.values() if name == parameter else [one]
        return _with_parameters(taking, merged)

    return decorate


def with_flags_of(
    other: Callable[..., None], *without: str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator of commands, which adds the flags of another command.

    The decorated function receives their values as `flags`, a dict for the other one.

    Args:
        other: the command.
        without: its parameters whose flags are left out.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters
        theirs = inspect.signature(other, eval_str=True).parameters
        added = {name: one for name, one in theirs.items() if name not in without}

        @functools.wraps(command)
        def taking(**given: Any) -> None:
            values = {name: given.pop(name) for name in added if name in given}
            command(**given, flags=values)

        merged = [*(one for name, one in own.items() if name != "flags"), *added.values()]
        return _with_parameters(taking, merged)

    return decorate


def numbers(flag: str, text: str) -> tuple[int, ...]:
    """The value of a flag that takes whole numbers; () for "".

    Raises:
        EdgeLLMError: the text is not a list of whole numbers.
    """
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise EdgeLLMError(f"{flag} {text}: give whole numbers, such as 2,15,27") from None


def run_command(app: App, *, second_ends: bool = True) -> None:
    """Run a command line; an error prints one line and its hint on stderr, exit code not 0.

    With `--debug` it prints the traceback. The second Ctrl-C kills the process at once, unless
    `second_ends` is false.
    """
    interrupts: list[int] = []

    def interrupt(number: int, _frame: object) -> None:
        interrupts.append(number)
        if second_ends:
            signal.signal(number, signal.SIG_DFL)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        is_hangup = number == signal.SIGHUP
        if not (is_hangup and signal.getsignal(number) is signal.SIG_IGN):  # of nohup
            signal.signal(number, interrupt)
    sys.unraisablehook = _interrupt_again
    printed = _open_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except BaseException as error:  # only at the top level of a command
        if isinstance(error, SystemExit) and not interrupts:
            _finish(printed, error.code)
        # Extension modules turn an interrupt during their import into an ImportError.
        if interrupts or isinstance(error, KeyboardInterrupt):
            kept = app.kept or NOTHING_HALF_WRITTEN
            _fail(f"interrupted; {kept}", _same_command() if app.kept else "", INTERRUPTED_CODE)
        if isinstance(error, SystemExit) or app.shows_tracebacks:
            raise
        _fail(*_explain(error))


def _same_command() -> str:
    module = getattr(sys.modules["__main__"], "__spec__", None)  # of python -m
    name = os.path.basename(sys.argv[0])
    words = ["python", "-m", module.parent] if module is not None else [name]
    return f"the same command goes on: {shlex.join([*words, *sys.argv[1:]])}"


class _Stderr(io.FileIO):
    """Notes that cannot be written, to a full disk or a pipe without reader, are dropped."""

    def write(self, data: Any, /) -> int | None:
        """Write, or pretend to: the work goes on, and the exit code shows how it ended."""
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


class _Stdout(io.FileIO):
    """Standard output, which errors name; the text for a closed one is lost, see `_finish`."""

    is_closed = False  # by the caller
    is_lost = False  # whether text was

    def write(self, data: Any, /) -> int | None:
        """Write, or raise once: Python writes what it holds again at the end.

        A command goes on whose caller closed the stream, since files may be its result.
        """
        if self.is_closed or self.is_lost:
            self.is_lost = True
            return memoryview(data).nbytes
        try:
            return super().write(data)
        except OSError as error:
            self.is_lost = True
            number = error.errno or errno.EIO
            raise OSError(number, os.strerror(number), "standard output") from None


def _open_streams() -> _Stdout | None:
    """Open what the caller closed, so that no file gets its number, and let no note fail.

    Returns:
        Standard output; None where a test has replaced it.
    """
    is_closed = sys.stdout is None
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115 - for the life of the process
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
    errors, printed = sys.stderr, sys.stdout
    if errors is sys.__stderr__ and isinstance(errors, io.TextIOWrapper):
        raw = _Stderr(errors.fileno(), "w", closefd=False)
        sys.stderr = io.TextIOWrapper(
            io.BufferedWriter(raw), encoding=errors.encoding, line_buffering=True
        )
    if printed is not sys.__stdout__ or not isinstance(printed, io.TextIOWrapper):
        return None
    out = _Stdout(printed.fileno(), "w", closefd=False)
    out.is_closed = is_closed
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(out),
        encoding=printed.encoding,
        line_buffering=printed.line_buffering,
        write_through=printed.write_through,
    )
    return out


def _finish(printed: _Stdout | None, code: object) -> None:
    """Write what standard output holds, and end a command whose text was lost with an error."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # its reader has seen enough
        raise SystemExit(code or 1) from None
    except OSError as error:
        _fail(*_explain(error))
    if printed is not None and printed.is_closed and printed.is_lost and not code:
        _fail(
            "standard output is closed: what the command printed is lost",
            "redirect it to a file, or to /dev/null",
            2,
        )


def _interrupt_again(ignored: sys.UnraisableHookArgs) -> None:
    """Raise an interrupt once more that came where Python ignores exceptions, as in `__del__`."""
    if not isinstance(ignored.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(ignored)
        return
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)


def _explain(error: BaseException) -> tuple[str, str, int]:
    """Message, hint and exit code."""
    if isinstance(error, EdgeLLMError):
        return str(error), error.hint, 2
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return "out of memory", "close other programs or use a smaller model", 2
    if isinstance(error, OSError) and error.errno is not None:
        from edgellm.core.resources import NO_TEMPORARY, is_no_temporary

        if is_no_temporary(error):
            return NO_TEMPORARY, "set TMPDIR to a folder that can be written", 2
        hint = "free some space or give another folder" if error.errno == errno.ENOSPC else ""
        where = f" ({error.filename})" if error.filename else ""
        return f"{os.strerror(error.errno)}{where}", hint, 2
    if isinstance(error, RuntimeError) and "Symlink loop" in str(error):  # before Python 3.13
        return str(error), "give a path whose links end at a file or folder", 2
    if isinstance(error, RuntimeError) and "home directory" in str(error):  # of a path with ~
        return "this user has no home directory, which ~ means", "set HOME, or give a full path", 2
    if isinstance(error, ModuleNotFoundError):
        from edgellm.core.commands.extras import remedy

        return f"{error.name} is not installed", remedy(error.name or ""), 2
    detail = str(error).splitlines()[0] if str(error) else ""
    return f"unexpected {type(error).__name__}: {detail}", "run it with --debug and report it", 3


def _clip(message: str) -> str:
    """Bounds its length: a value of a damaged file may have megabytes."""
    if len(message) <= _MAX_MESSAGE:
        return message
    return f"{message[: _MAX_MESSAGE // 2]} ... {message[-_MAX_MESSAGE // 4 :]}"


def _fail(message: str, hint: str, code: int) -> None:
    red, plain = ("\033[31m", "\033[0m") if sys.stderr.isatty() else ("", "")
    print(f"{red}error:{plain} {_clip(message)}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)
    raise SystemExit(code)
