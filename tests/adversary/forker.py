"""Runs commands in forks of a process that has imported them: milliseconds instead of seconds.

Reads one JSON object in a line for each command, and writes into its file `ended` the process id,
then how it ended.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import resource
import signal
import sys
import traceback
from typing import Any

DEVICE = (
    "edgellm.export.pipeline.llm",
    "edgellm.export.pipeline.open_checkpoint",
    "edgellm.export.pipeline.draft",
    "edgellm.export.checkpoints.gguf.gguf_checkpoint",
    "edgellm.build.engine",
    "edgellm.build.onnxruntime_cpu",
    "edgellm.device_runtime.api.llm",
    "edgellm.device_runtime.request_files.responses",
    "edgellm.tools.transfer.cli",
    "edgellm.export.drafts.eagle3",
    "typer._adapters",  # pydantic, which typer imports when a command line is read
    "tokenizers",
    "gguf",
    "torch",  # pickled checkpoints need it
)
TORCH = ("transformers", "modelopt.torch.quantization")


def _run(job: dict[str, Any]) -> int:
    """In the child: the command as its script runs it."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in enumerate(("stdout", "stderr"), 1):
        os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    os.chdir(job["folder"])
    for name in os.environ.keys() - job["environment"].keys():
        del os.environ[name]
    os.environ.update(job["environment"])
    for name, maximum in job["limits"].items():
        resource.setrlimit(getattr(resource, name), (maximum, maximum))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)  # no message from an end while modules are imported
    sys.argv = [job["command"], *job["arguments"]]
    sys.modules["__main__"].__spec__ = None  # as of a script
    module = importlib.import_module(job["module"])
    try:
        getattr(module, job["function"])()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
        return 1
    return 0


def _child(job: dict[str, Any]) -> None:
    code = _run(job)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)  # the command has ended
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _watch(job: dict[str, Any]) -> None:
    """In a process of its own: start the command and wait for it; others start meanwhile."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if (pid := os.fork()) == 0:
        _child(job)
    with open(job["ended"], "w") as ended:
        ended.write(f"{pid}\n")
        ended.flush()
        _, status, usage = os.wait4(pid, 0)
        ended.write(json.dumps([os.waitstatus_to_exitcode(status), usage.ru_maxrss]) + "\n")
    os._exit(0)


def serve(modules: list[str]) -> None:
    """Until stdin ends."""
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing waits for the watching processes
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        job = json.loads(line)
        if os.fork() == 0:
            _watch(job)


if __name__ == "__main__":
    serve(sys.argv[1:])
