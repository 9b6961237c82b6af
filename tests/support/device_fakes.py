"""A device that is a folder: executables `ssh` and `rsync` that record their arguments.

`ssh` runs the command in the device's home with the device's own PATH, `rsync` copies there. What
goes wrong is said in environment variables.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellm.tools.transfer.file_list import load
from edgellm.tools.transfer.push import Delivery, deliver
from edgellm.tools.transfer.target import connected, parse

_SSH = """#!/bin/sh
printf '%s\\n' "$*" >> "$DEVICE_LOG/ssh"
[ -n "$SSH_FAILS" ] && { printf '%s\\n' "$SSH_FAILS" >&2; exit 255; }
while [ $# -gt 0 ]; do
  case "$1" in -o | -l) shift 2;; -O) exit 0;; *) break;; esac
done
shift
cd "$DEVICE_HOME" && PATH="$DEVICE_PATH" exec sh -c "$*"
"""
_RSYNC = """#!{python} -S
import json, os, pathlib, signal, sys, time
arguments = sys.argv[1:]
names = sys.stdin.read().splitlines()
log = pathlib.Path(os.environ["DEVICE_LOG"], "rsync")
with log.open("a") as file:
    file.write(json.dumps([arguments, names]) + chr(10))
source, target = pathlib.Path(arguments[-2]), arguments[-1].partition(":")[2]
stage = pathlib.Path(os.environ["DEVICE_HOME"], target)
fault = os.environ.get("RSYNC_FAILS", "")
if fault.startswith("says "):
    print(fault[5:], file=sys.stderr)
    sys.exit(11)
literal = matched = 0
for name in names:
    partial = stage / ".partial" / name
    partial.parent.mkdir(parents=True, exist_ok=True)
    content = (source / name).read_bytes()
    kept = partial.stat().st_size if partial.exists() else 0
    if fault:
        partial.write_bytes(content[: len(content) // 2])
    if fault == "hang":
        def stop(*_):
            with log.open("a") as file:
                file.write(json.dumps("terminated") + chr(10))
            sys.exit(20)
        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        (log.parent / "hanging").touch()
        time.sleep(60)
    if fault == "cut":
        print("rsync error: received SIGINT (code 20)", file=sys.stderr)
        sys.exit(20)
    literal, matched = literal + len(content) - kept, matched + kept
    (stage / name).parent.mkdir(parents=True, exist_ok=True)
    (stage / name).write_bytes(content[:-1] + b"?" if fault == "garble" else content)
    partial.unlink(missing_ok=True)
print(f"Literal data: {{literal:,}} bytes")
print(f"Matched data: {{matched:,}} bytes")
"""
_ON_THE_DEVICE = ["sh", "sha256sum", "cat", "df", "mkdir", "mv", "rm", "tail"]


CONTENTS = {
    "model.onnx": b"graph",
    "model.weights": bytes(range(256)) * 40,
    "sub/it's $(touch oops).txt": b"odd name",
}
ALL = (*CONTENTS, "manifest.json")
PLACE = "robot@device:models/bundle"


@dataclass(frozen=True)
class Device:
    """The fake device of a test."""

    home: Path
    commands: Path  # that the device has
    log: Path

    def ssh_calls(self) -> list[str]:
        return (self.log / "ssh").read_text().splitlines()

    def rsync_calls(self) -> list[Any]:
        """Arguments and names of each call, or "terminated"."""
        path = self.log / "rsync"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def environment(self, here: Path) -> dict[str, str]:
        """Environment variables of the fakes, which are in `here`."""
        return {
            "PATH": f"{here}{os.pathsep}{os.environ['PATH']}",
            "DEVICE_HOME": str(self.home),
            "DEVICE_PATH": str(self.commands),
            "DEVICE_LOG": str(self.log),
        }


def make_device(folder: Path) -> tuple[Device, Path]:
    """A device in a folder, and the folder of the fakes that reach it."""
    device = Device(folder / "home", folder / "device-bin", folder / "log")
    here = folder / "bin"
    for path in (device.home, device.commands, device.log, here):
        path.mkdir()
    for name, text in (("ssh", _SSH), ("rsync", _RSYNC.format(python=sys.executable))):
        write_command(here / name, text)
    for name in _ON_THE_DEVICE:
        (device.commands / name).symlink_to(str(shutil.which(name)))
    write_command(device.commands / "rsync", "#!/bin/sh\nexit 1\n")
    return device, here


def make_bundle(folder: Path, contents: dict[str, bytes], kind: str = "llm_bundle") -> Path:
    """A folder whose manifest lists `contents`."""
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    files = {
        name: {"num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in contents.items()
    }
    (folder / "manifest.json").write_text(json.dumps({"kind": kind, "files": files}))
    return folder


def write_command(path: Path, text: str) -> None:
    """An executable file."""
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def deliver_to(bundle: Path, to: str) -> Delivery:
    with connected(parse(to)) as target:
        return deliver(load(bundle), target)


def run_transfer(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "edgellm.tools.transfer", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def terminate_transfer(device: Device, *arguments: object) -> tuple[int, list[str]]:
    """End the command when rsync hangs: its exit code and its lines of errors."""
    command = [sys.executable, "-m", "edgellm.tools.transfer", *map(str, arguments)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not device.rsync_calls() or not (device.log / "hanging").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors.splitlines()
