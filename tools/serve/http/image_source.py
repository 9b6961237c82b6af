"""Images, videos and audio of requests: `data:` URIs, and allowed files and hosts."""

from __future__ import annotations

import base64
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import anyio.to_thread

from edgellm.tools.serve.http.errors import ApiError
from edgellm.tools.serve.settings import MEDIA_BODY_BYTES, ImageRules

_FETCH_TIMEOUT_S = 20


async def image_source(url: str, rules: ImageRules, field: str = "image_url") -> str:
    """The source for the engine: a `data:` URI, or the path of an allowed file.

    Args:
        url: of an image, video or audio.
        rules: allowed files and hosts.
        field: of the request, in messages.

    Raises:
        ApiError: 400 for a source that is not allowed, whether it exists or not.
    """
    scheme = url.partition(":")[0].lower()
    if scheme == "data":
        return url
    if scheme == "file":
        return str(_allowed_file(url, rules.folders, field))
    if scheme in ("http", "https"):
        return await anyio.to_thread.run_sync(_fetch, url, rules.hosts, field)
    example = (
        "audio/wav;base64,UklGRi..." if field == "audio_url" else "image/png;base64,iVBORw0..."
    )
    raise _refusal(f"{field}: only data: URIs are taken, such as data:{example}")


def _allowed_file(url: str, folders: tuple[Path, ...], field: str) -> Path:
    if not folders:
        raise _refusal(f"{field}: file: URLs are not allowed here; send a data: URI")
    outside = _refusal(f"{field}: this file is outside the folders that are allowed")
    try:
        parts = urlsplit(url)
        path = Path(url2pathname(parts.path)).resolve()  # links and .. are followed first
    except (ValueError, OSError, RuntimeError):
        raise outside from None
    if parts.netloc not in ("", "localhost") or not any(map(path.is_relative_to, folders)):
        raise outside
    return path


def _fetch(url: str, hosts: frozenset[str], field: str) -> str:
    """Fetch a file as a `data:` URI; blocking, runs in a thread."""
    if not hosts:
        raise _refusal(f"{field}: http URLs are not allowed here; send a data: URI")
    try:
        parts = urlsplit(url)
        named = {parts.netloc.lower(), (parts.hostname or "").lower()}
        standard = parts.port in (None, 80, 443)
    except ValueError:
        raise _refusal(f"{field}: this is no URL") from None
    if parts.username is not None or not (
        parts.netloc.lower() in hosts or (standard and named & hosts)
    ):
        raise _refusal(f"{field}: this host is not among those that are allowed")
    opener = urllib.request.build_opener(_NoRedirects, urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_FETCH_TIMEOUT_S) as response:
            content = response.read(MEDIA_BODY_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or type(error).__name__
        raise _refusal(f"{field}: it cannot be fetched: {reason}") from None
    if len(content) > MEDIA_BODY_BYTES:
        raise _refusal(f"{field}: it has more than {MEDIA_BODY_BYTES} bytes")
    return "data:image/unknown;base64," + base64.b64encode(content).decode()


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirects, which could leave the allowed hosts."""

    def redirect_request(
        self, req: object, fp: object, code: object, msg: object, headers: object, newurl: object
    ) -> None:
        """Return None: the redirect fails."""
        del req, fp, code, msg, headers, newurl


def _refusal(message: str) -> ApiError:
    return ApiError(400, message, param="messages")
