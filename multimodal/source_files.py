"""Files that messages name: paths, `file://` and `data:` URIs, with strict checks."""

from __future__ import annotations

import base64
import binascii
import re
from pathlib import Path
from urllib.parse import unquote
from urllib.request import url2pathname

from edgellm.core.errors import RequestError

MAX_FILE_BYTES = 512 * 2**20


def read_source(source: str, folder: Path, kind: str = "picture") -> tuple[str, bytes]:
    """The name of a file in messages, and its bytes.

    Args:
        source: a path, relative to `folder` or absolute, a `file://` URI, or a base64 `data:` URI.
        folder: the base of relative paths.
        kind: of the file, in messages.

    Raises:
        RequestError: the file cannot be read, or is too large.
    """
    if source[:5].lower() == "data:":
        return "the data: URI", _read_data_uri(source)
    name = source if len(source) <= 120 else f"{source[:120]}..."
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]+)://", source)
    if scheme is None:
        return name, _read_file(folder / source, name, kind, f"relative paths begin at {folder}")
    if scheme[1].lower() in ("http", "https"):
        raise RequestError(
            f"{name}: {kind}s are not fetched from the network",
            hint="download it first, and give the path of the file",
        )
    if scheme[1].lower() != "file":
        raise RequestError(
            f"{name}: {scheme[1]}:// is not supported", hint="give a path, a file:// or data: URI"
        )
    machine, slash, path = source[len("file://") :].partition("/")
    if machine not in ("", "localhost"):
        raise RequestError(
            f"{name} names the machine {machine}",
            hint="an absolute path has three slashes before it: file:///home/me/cat.jpg",
        )
    path = url2pathname(slash + path)
    return name, _read_file(Path(path), name, kind, f"give the path of a {kind}")


def _read_data_uri(source: str) -> bytes:
    header, comma, payload = source.partition(",")
    if not comma or not header.lower().endswith(";base64"):
        raise RequestError(
            "a data: URI must hold base64", hint="write data:image/png;base64,iVBORw0..."
        )
    compact = "".join(unquote(payload).split())
    try:
        return base64.b64decode(compact, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(
            f"the data: URI holds damaged base64: {str(error).lower()}",
            hint="encode the whole file, with the = at the end",
        ) from None


def _read_file(path: Path, name: str, kind: str, hint: str) -> bytes:
    try:
        if path.is_dir():
            raise RequestError(f"{name} is a folder", hint=f"give one {kind}")
        size = path.stat().st_size
        if not path.is_file():
            raise RequestError(f"{name} is not a regular file", hint=f"copy the {kind} to a file")
        if size > MAX_FILE_BYTES:
            raise RequestError(
                f"{name} has {size} bytes, more than {MAX_FILE_BYTES}", hint=f"compress the {kind}"
            )
        return path.read_bytes()
    except OSError as error:
        raise RequestError(f"cannot read {name}: {error.strerror}", hint=hint) from None
    except ValueError as error:  # a zero byte in the path
        raise RequestError(f"{name!r} is not a path: {error}", hint=hint) from None
