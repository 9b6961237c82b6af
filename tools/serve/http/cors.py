"""Web pages that can use the server: its own, and those of allowed origins.

A page of another site can send a form's POST without a preflight, and would make the engine work.
Browsers send the origin of a request; clients without this header are not web pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware

from edgellm.core.errors import EdgeLLMError
from edgellm.tools.serve.http.errors import ApiError

ANY = "*"
IGNORED, SEED = "x-edgellm-ignored", "x-edgellm-seed"  # headers of responses
_EXPOSED_HEADERS = ("retry-after", "www-authenticate", IGNORED, SEED)


def read_origins(given: Sequence[str]) -> frozenset[str]:
    """Normalize the origins of `--allowOrigin`.

    Raises:
        EdgeLLMError: one is not an origin.
    """
    return frozenset(map(_origin, given))


def _origin(text: str) -> str:
    if text == ANY:
        return ANY
    try:
        parts = urlsplit(text)
        name, port = parts.hostname or "", parts.port
    except ValueError:
        parts, name, port = urlsplit(""), "", None
    shown = f"[{name}]" if ":" in name else name
    rest = (parts.path.removesuffix("/"), parts.query, parts.fragment, parts.username or "")
    if not parts.scheme or not name or any(rest):
        raise EdgeLLMError(
            f"--allowOrigin {text} is not an origin",
            hint="give scheme, host and port as the browser does: https://chat.example.com, "
            "http://localhost:3000; * allows every page",
        )
    standard = {"http": 80, "https": 443}.get(parts.scheme)
    return f"{parts.scheme}://{shown}" + (f":{port}" if port not in (None, standard) else "")


def require_known_site(headers: Headers, allowed: frozenset[str]) -> None:
    """Raise `ApiError` 403 for a request of a web page of another site."""
    origin = headers.get("origin")
    if ANY in allowed or origin in allowed:
        return
    site = headers.get("sec-fetch-site")
    if site is not None:
        is_known = site in ("same-origin", "none")
    else:  # an older browser, or a page without TLS
        is_known = origin is None or urlsplit(origin).netloc == headers.get("host")
    if not is_known:
        raise ApiError(
            403,
            f"pages of {origin or 'other sites'} may not use this server; "
            "its owner can let them in: --allowOrigin",
        )


def share(app: Starlette, allowed: frozenset[str]) -> None:
    """Add CORS headers for the allowed origins."""
    if allowed:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=sorted(allowed),
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=_EXPOSED_HEADERS,
        )
