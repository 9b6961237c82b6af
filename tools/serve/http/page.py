"""The chat page: static files, and the libraries that it ships."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from starlette.responses import Response

_FOLDER = Path(__file__).parents[1] / "page"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".LICENSE": "text/plain; charset=utf-8",
}
# The page loads and runs only its own files, whatever the model outputs. HTML is set only after
# DOMPurify has sanitized it: browsers with trusted types reject any other HTML.
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src data:; media-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types dompurify",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    """Serve the page at `/`, and its other files below `/page/`."""
    for file in sorted(_FOLDER.rglob("*")):
        if media_type := _MEDIA_TYPES.get(file.suffix):
            path = f"/page/{file.relative_to(_FOLDER).as_posix()}"
            _add(app, "/" if file.suffix == ".html" else path, file.read_bytes(), media_type)


def _add(app: FastAPI, path: str, content: bytes, media_type: str) -> None:
    @app.get(path, include_in_schema=False)
    async def page() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)
