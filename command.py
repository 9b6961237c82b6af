"""How every command ends: one line and its remedy on stderr, and an exit code."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable

from edgellm.contract import EdgeLLMError


def run_command(command: Callable[[], object]) -> None:
    """Run a command line; a failure becomes one line and its remedy on stderr, exit code not 0.

    `--debug` anywhere on the command line shows the traceback instead.
    """
    debug = "--debug" in sys.argv
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    try:
        command()
    except SystemExit as stop:
        if stop.code == 130:  # how Typer reports Ctrl-C
            _fail("interrupted; nothing half-written was left", "", 130)
        raise
    except EdgeLLMError as error:
        if debug:
            raise
        _fail(str(error), error.hint, 2)
    except OSError as error:
        if debug or error.errno is None:
            raise
        hint = "free some space or give another folder" if error.errno == errno.ENOSPC else ""
        where = f" ({error.filename})" if error.filename else ""
        _fail(f"{os.strerror(error.errno)}{where}", hint, 2)
    except MemoryError:
        _fail("out of memory", "close other programs or use a smaller model", 2)
    except Exception as error:
        if debug:
            raise
        detail = str(error).splitlines()[0] if str(error) else ""
        _fail(
            f"unexpected {type(error).__name__}: {detail}", "run it with --debug and report it", 3
        )


def _fail(message: str, hint: str, code: int) -> None:
    red, plain = ("\033[31m", "\033[0m") if sys.stderr.isatty() else ("", "")
    print(f"{red}error:{plain} {message}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)
    raise SystemExit(code)
