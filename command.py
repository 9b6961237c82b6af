"""How every command ends: one line and its remedy on stderr, and an exit code."""

from __future__ import annotations

import errno
import io
import os
import re
import signal
import sys
from collections.abc import Callable

from edgellm.contract import EdgeLLMError

# Flags are camelCase; --engine-dir is --engineDir.
ONE_CASE = {"token_normalize_func": lambda name: re.sub("-(.)", lambda m: m[1].upper(), name)}


def numbers(flag: str, text: str) -> tuple[int, ...]:
    """The value of a flag that takes whole numbers; () for "".

    Raises:
        EdgeLLMError: it is something else.
    """
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise EdgeLLMError(f"{flag} {text}: give whole numbers, such as 2,15,27") from None


def run_command(command: Callable[[], object], *, second_ends: bool = True) -> None:
    """Run a command line; a failure becomes one line and its remedy on stderr, exit code not 0.

    `--debug` anywhere on the command line shows the traceback instead. The second Ctrl-C ends the
    process at once, whatever it is at, unless `second_ends` is false: for a command that goes on.
    """
    interrupts: list[int] = []

    def interrupt(number: int, _frame: object) -> None:
        interrupts.append(number)
        if second_ends:
            signal.signal(number, signal.SIG_DFL)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        command()
    except BaseException as error:  # the last resort of a command, not of a library
        # Extension modules turn an interrupt during their import into an ImportError.
        if interrupts or isinstance(error, KeyboardInterrupt):
            _fail("interrupted; nothing half-written was left", "", 130)
        if isinstance(error, SystemExit) or "--debug" in sys.argv:
            raise
        _fail(*_explain(error))


def _explain(error: BaseException) -> tuple[str, str, int]:
    """Message, hint and exit code."""
    if isinstance(error, EdgeLLMError):
        return str(error), error.hint, 2
    if isinstance(error, OSError) and error.errno is not None:
        hint = "free some space or give another folder" if error.errno == errno.ENOSPC else ""
        where = f" ({error.filename})" if error.filename else ""
        return f"{os.strerror(error.errno)}{where}", hint, 2
    if isinstance(error, MemoryError):
        return "out of memory", "close other programs or use a smaller model", 2
    if isinstance(error, ModuleNotFoundError):
        extras = (
            "in edgellm's folder: pip install '.[export]' on the host, '.[device]' on the device, "
            "'.[device,serve]' for edgellm-serve"
        )
        return f"{error.name} is not installed", extras, 2
    detail = str(error).splitlines()[0] if str(error) else ""
    return f"unexpected {type(error).__name__}: {detail}", "run it with --debug and report it", 3


def _fail(message: str, hint: str, code: int) -> None:
    red, plain = ("\033[31m", "\033[0m") if sys.stderr.isatty() else ("", "")
    print(f"{red}error:{plain} {message}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)
    raise SystemExit(code)
