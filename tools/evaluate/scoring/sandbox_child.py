"""Child process of the sandbox: isolates itself, then runs a program. Standard library only.

`sandbox.py` passes this source to a bare interpreter, and the job as JSON on stdin. The verdict is
written to the job's file descriptor, with a secret word that the program does not know.
"""

import contextlib
import ctypes
import io
import json
import os
import resource
import signal
import struct
import sys

NOBODY = 65534
_AT_FDCWD, _AT_RECURSIVE, _MOUNT_SETATTR, _READ_ONLY = -100, 0x8000, 442, 1
_KEEP_CAPS, _NO_NEW_PRIVILEGES = 8, 38
_CAPABILITIES_V3, _READ_ALL = 0x20080522, 1 << 2


def _checked(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def isolate_files(libc: ctypes.CDLL, folder: str, max_bytes: int) -> None:
    """Make all files read-only except a small tmpfs at `folder`; needs namespaces."""
    read_only = struct.pack("QQQQ", _READ_ONLY, 0, 0, 0)
    size = ctypes.c_size_t(len(read_only))
    result = libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, read_only, size)
    _checked(result)
    options = f"size={max_bytes},mode=0777".encode()
    _checked(libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, options))


def drop_privileges(libc: ctypes.CDLL, *, is_root: bool) -> None:
    """Switch from root to the user `nobody`, with only the capability to read all files."""
    kept = 0
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if is_root:
        libc.prctl(_KEEP_CAPS, 1, 0, 0, 0)
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        kept = _READ_ALL  # the interpreter may be in root's home
    header = struct.pack("Ii", _CAPABILITIES_V3, 0)
    _checked(libc.capset(header, struct.pack("6I", kept, kept, 0, 0, 0, 0)))


def limit(job: dict) -> None:
    """Limit time, memory, files and processes."""
    for what, maximum in (
        (resource.RLIMIT_AS, job["memory_bytes"]),
        (resource.RLIMIT_FSIZE, job["file_bytes"]),
        (resource.RLIMIT_NPROC, job["processes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (maximum, maximum))
    seconds = job["seconds"]
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))  # signal, then kill

    def stop(_number: int, _frame: object) -> None:
        raise TimeoutError(f"more than {seconds} s")

    signal.signal(signal.SIGXCPU, stop)
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)


def run(source: str) -> str:
    """Run the program; return its error, empty if it passes."""
    try:
        code = compile(source, "<answer>", "exec")
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            exec(code, {"__name__": "__main__"})
    except BaseException as error:  # noqa: BLE001 - also sys.exit and KeyboardInterrupt
        signal.alarm(0)
        return f"{type(error).__name__}: {error}"[:200]
    return ""


def main() -> None:
    """Read the job, isolate the process, run the program, write the verdict."""
    job = json.loads(sys.stdin.buffer.read())
    libc = ctypes.CDLL(None, use_errno=True)
    if job["shielded"]:
        isolate_files(libc, job["folder"], job["file_bytes"])
    os.chdir(job["folder"])
    drop_privileges(libc, is_root=job["is_root"])
    limit(job)
    own = os.getpid()
    error = run(job["source"])
    if os.getpid() != own:  # a forked child gives no verdict
        os._exit(0)
    os.write(job["verdict"], json.dumps([job["word"], error]).encode())
    os._exit(0)


if __name__ == "__main__":
    main()
