"""Debian's base system for aarch64 in a folder; an emulator runs it, or an ARM processor.

Its programs start each other as on a board, since the kernel gives them to the emulator. That is
registered in a user namespace of its own (Linux 6.7), so the machine stays as it is.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "edgellm", "arm")
SUITE = "bookworm"
_PACKAGES = "python3-venv,g++,ca-certificates"
_HOOKS = "/usr/share/mmdebstrap/hooks/merged-usr"
_DONE = ".complete"
_EMULATOR = "qemu-aarch64-static"
_IS_ARM = platform.machine() in ("aarch64", "arm64")
# The header of a program for aarch64 and its mask; F: the emulator is opened here, not in the root.
_FORMAT = (
    r":edgellm-aarch64:M::\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
    r":\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff:{}:F"
)
# A board that ONNX Runtime does not know: it prints so when it is imported.
_PROCESSOR = """processor\t: {}
BogoMIPS\t: 48.00
Features\t: fp asimd aes pmull sha1 sha2 crc32 atomics fphp asimdhp asimdrdm asimddp i8mm
CPU implementer\t: 0x99
CPU architecture: 8
CPU variant\t: 0x1
CPU part\t: 0x123
CPU revision\t: 0

"""
_ENTER = """
root=$1; format=$2; processors=$3; binds=$4; shift 4
if [ -n "$format" ]; then
    mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
    printf %s "$format" > /proc/sys/fs/binfmt_misc/register
fi
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
[ -z "$format" ] || mount --bind "$processors" "$root/proc/cpuinfo"
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
while IFS="$(printf '\\t')" read -r outside inside; do
    mkdir -p "$root$inside"
    mount --bind "$outside" "$root$inside"
done < "$binds"
exec chroot "$root" "$@"
"""
_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
}


class UserlandError(Exception):
    """The userland cannot be made or entered; the message has the remedy."""


class Userland:
    """A root folder with programs for aarch64.

    Attributes:
        root: the folder.
        folders: folders outside by their paths inside; a command's working folder is the last.
    """

    def __init__(self, root: Path, folders: Mapping[str, Path]) -> None:
        self.root, self.folders = root, folders

    def command(self, words: Sequence[str], **environment: str) -> list[str]:
        """Words that run a command of the userland, as root of a user namespace."""
        script = CACHE / "enter"
        script.mkdir(parents=True, exist_ok=True)
        processors, binds = script / "cpuinfo", script / f"{_digest(*self.folders)}.binds"
        count = min(len(os.sched_getaffinity(0)), 4)
        processors.write_text("".join(_PROCESSOR.format(at) for at in range(count)))
        binds.write_text("".join(f"{out}\t{inside}\n" for inside, out in self.folders.items()))
        form = "" if _IS_ARM else _FORMAT.format(_emulator())
        variables = [f"{key}={value}" for key, value in (_ENVIRONMENT | environment).items()]
        return [
            "unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child",
            "env", "-i", *variables, "sh", "-ec", _ENTER, "sh",
            str(self.root), form, str(processors), str(binds), *words,
        ]  # fmt: skip

    def run(
        self, words: Sequence[str], *, seconds: float = 1800, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command; its output is one text."""
        return subprocess.run(
            self.command(words, **environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
            check=False,
        )


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def _emulator() -> str:
    found = shutil.which(_EMULATOR)
    if found is None:
        raise UserlandError(f"{_EMULATOR} is missing: apt-get install qemu-user-static")
    return found


def open_userland(root: Path | None, folders: Mapping[str, Path]) -> Userland:
    """A userland that runs; made in the cache if no root is given.

    Raises:
        UserlandError: it cannot be made, or its programs do not start here.
    """
    if root is None:
        root = CACHE / f"{SUITE}-{_digest(_PACKAGES)}"
        if not (root / _DONE).exists():
            _make(root)
    found = Userland(root.resolve(), folders)
    asked = found.run(["uname", "-m"], seconds=60)
    if asked.stdout.strip() != "aarch64":
        raise UserlandError(
            f"the programs of {root} do not start: {asked.stdout.strip()}\n"
            "user namespaces must be allowed, and emulation in them needs Linux 6.7 or newer"
        )
    return found


def _make(root: Path) -> None:
    """Unpack Debian's packages; no script of theirs runs, so the processor does not matter."""
    if shutil.which("mmdebstrap") is None:
        raise UserlandError("mmdebstrap is missing: apt-get install mmdebstrap, or give --root")
    shutil.rmtree(root, ignore_errors=True)
    root.parent.mkdir(parents=True, exist_ok=True)
    made = subprocess.run(
        [
            "mmdebstrap", "--quiet", "--variant=extract", "--mode=root", "--arch=arm64",
            f"--hook-dir={_HOOKS}", "--include=?essential", f"--include={_PACKAGES}", SUITE, root,
        ],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        check=False,
    )  # fmt: skip
    if made.returncode:
        last = made.stdout.strip().splitlines()[-3:]
        raise UserlandError("\n".join(["mmdebstrap fails; it needs root:", *last]))
    # Files that the packages' scripts write
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n")
    (root / _DONE).touch()
