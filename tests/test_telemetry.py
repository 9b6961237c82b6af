"""Export, build, inference and serving write to their own folders and ask no other machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from http.client import HTTPConnection
from importlib.metadata import version
from pathlib import Path

import pytest
from numpy_llama import write_llama

from edgellm.core import NO_TELEMETRY
from edgellm.device_runtime.kernels.library import library_path

# In every process of a command: addresses are refused, as are files outside of the test's folder.
HOOK = """
import os, sys
ALLOWED = (os.environ["TEST_FOLDER"], "/dev/", "/proc/")
def hook(event, arguments):
    if event in ("socket.connect", "socket.sendto") and isinstance(arguments[1], tuple):
        fails = arguments[1][0] not in ("127.0.0.1", "::1")
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        fails = arguments[0] not in ("127.0.0.1", "localhost", None)
    elif event == "open" and isinstance(arguments[0], str):
        writes = (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR)
        fails = writes and not os.path.abspath(arguments[0]).startswith(ALLOWED)
    else:
        return
    if fails:
        os.write(2, f"outside: {event} {arguments}\\n".encode())
        os._exit(77)
sys.addaudithook(hook)
"""
HAS_TELEMETRY = tuple(map(int, version("onnxruntime").split(".")[:2])) >= (1, 29)
BIN = Path(sys.executable).parent


class Machine:
    """A user's folders; every command runs in them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("home", "tmp", "work", "hook", "cache/edgellm"):
            (folder / name).mkdir(parents=True)
        (folder / "hook/sitecustomize.py").write_text(HOOK)
        kernels = library_path()  # compiling them takes half a minute
        if kernels.parent.parent.name == "kernels":
            (folder / "cache/edgellm/kernels").symlink_to(kernels.parent.parent)
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder / "home"),
            "TMPDIR": str(folder / "tmp"),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "PYTHONPATH": str(folder / "hook"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TEST_FOLDER": str(folder),
        }
        self.trace = folder / "trace"
        tracing = ["strace", "-D", "-f", "-qq", "-o", self.trace, "-e", "trace=connect,sendto"]
        self.prefix = tracing if shutil.which("strace") else []

    def start(self, *words: object, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(word) for word in (*self.prefix, *words)],
            cwd=self.folder / "work",
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, name: str, *arguments: object, **environment: str) -> None:
        process = self.start(BIN / name, *arguments, **environment)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors

    def strangers(self) -> list[str]:
        """Files outside the outputs and edgellm's own cache; addresses other than this machine's.

        Names of sockets in the file system are no addresses.
        """
        places = [self.folder / name for name in ("home", "tmp", "cache")]
        files = [path for place in places for path in place.rglob("*") if not path.is_dir()]
        found = [str(path) for path in files if "edgellm" not in path.parts]
        lines = self.trace.read_text().splitlines() if self.trace.exists() else []
        asked = [line for line in lines if re.search(r"sa_family=AF_INET6?\b", line)]
        return found + [line for line in asked if not re.search(r'"127\.0\.0\.1"|"::1"', line)]


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path / "machine")


def _serve_once(machine: Machine, engine: Path) -> None:
    server = machine.start(BIN / "edgellm-serve", "--engineDir", engine, "--port", 0)
    assert server.stdout is not None
    try:
        port = int(re.search(r"http://127\.0\.0\.1:(\d+)", server.stdout.readline())[1])
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        body = {"messages": [{"role": "user", "content": "w9"}], "max_tokens": 4}
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        assert connection.getresponse().status == 200
        connection.close()
    finally:
        server.send_signal(signal.SIGTERM)
        _, errors = server.communicate(timeout=60)
    assert server.returncode == 0, errors


def test_the_pipeline_writes_its_folders_only_and_asks_no_address(machine):
    work = machine.folder / "work"
    write_llama(work / "checkpoint")
    machine.run("edgellm-export", "llm", "--model_dir", "checkpoint", "--output_dir", "bundle")
    sizes = ("--maxInputLen", 48, "--maxKVCacheCapacity", 64)
    machine.run("llm_build", "--onnxDir", "bundle", "--engineDir", "engine", *sizes)
    requests = {"requests": [{"messages": [{"role": "user", "content": "w9"}]}]}
    (work / "in.json").write_text(json.dumps(requests))
    files = ("--engineDir", "engine", "--inputFile", "in.json", "--outputFile", "out.json")
    machine.run("llm_inference", *files)
    _serve_once(machine, work / "engine")
    assert machine.strangers() == []
    made = {"checkpoint", "bundle", "engine", "in.json", "out.json"}
    assert {path.name for path in work.iterdir()} == made


@pytest.mark.skipif(not HAS_TELEMETRY, reason="this ONNX Runtime has no telemetry")
def test_a_users_own_value_stays(machine):
    """And the test above would see the files."""
    words = (sys.executable, "-c", "import edgellm.device_runtime, onnxruntime")
    for given, writes in ({}, False), ({"ORT_DISABLE_TELEMETRY": "0"}, True):
        process = machine.start(*words, **given)
        assert process.communicate(timeout=60) == ("", "")
        assert any("Microsoft" in path for path in machine.strangers()) is writes


@pytest.mark.parametrize(
    "package",
    ["build", "core", "device_runtime", "export", "multimodal", "quantize", "scripts", "tools"],
)
def test_every_package_switches_telemetry_off(package):
    code = f"import os, edgellm.{package}; print([os.environ[name] for name in {[*NO_TELEMETRY]}])"
    clean = {name: value for name, value in os.environ.items() if name not in NO_TELEMETRY}
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=clean, check=True
    )
    assert ended.stdout.strip() == repr([*NO_TELEMETRY.values()])


def test_the_hubs_client_reads_its_variable():
    code = (
        "import edgellm.export, huggingface_hub.constants as c; print(c.HF_HUB_DISABLE_TELEMETRY)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "True\n"
