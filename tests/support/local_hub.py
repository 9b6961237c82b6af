"""A Hugging Face hub on this machine: the requests that huggingface_hub makes for downloads.

It follows the hub's documented protocol: model information with file sizes, HEAD with ETag and
commit, a redirect of large files to another address, ranges, error codes of gated and missing
repositories.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

LARGE = (".safetensors", ".gguf", ".bin")  # stored elsewhere: their ETag is a sha256


@dataclass
class LocalHub:
    """Its repositories and what it was asked; tests change the attributes while it runs."""

    url: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)  # open to the token "hf_member" only
    cut_after: int | None = None  # bytes of the next large file, then the connection breaks
    requests: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, range

    def add(self, repository: str, files: Path | Mapping[str, bytes]) -> None:
        """Publish a folder's files, or contents by name."""
        if isinstance(files, Path):
            files = {path.name: path.read_bytes() for path in files.iterdir() if path.is_file()}
        self.repositories[repository] = dict(files)

    def commit(self, repository: str) -> str:
        """The hash of a repository's contents."""
        digest = hashlib.sha1()
        for name, content in sorted(self.repositories[repository].items()):
            digest.update(name.encode() + content)
        return digest.hexdigest()

    def environment(self, folder: Path) -> dict[str, str]:
        """Environment of a user of this hub, whose caches lie in a folder."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(folder / "hf"),
            "HF_HUB_DISABLE_XET": "1",
            "EDGELLM_HOME": str(folder / "edgellm"),
        }


@contextlib.contextmanager
def serve_hub() -> Iterator[LocalHub]:
    """Serve a hub without repositories while the block runs."""
    hub = LocalHub()

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: LocalHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def _answer(self, *, has_body: bool) -> None:
        path = unquote(self.path.partition("?")[0])
        self.hub.requests.append((self.command, path, self.headers.get("Range", "")))
        parts = path.strip("/").split("/")
        if parts[0] == "cdn":
            self._send_large(
                self._content("/".join(parts[1:3]), "/".join(parts[3:])), has_body=has_body
            )
        elif parts[:2] == ["api", "models"]:
            self._send_info("/".join(parts[2:4]), parts[4:])
        elif len(parts) > 4 and parts[2] == "resolve":
            self._send_file("/".join(parts[:2]), "/".join(parts[4:]), has_body=has_body)
        else:
            self._fail(404, "")

    def _content(self, repository: str, name: str) -> bytes:
        return self.hub.repositories[repository][name]

    def _is_refused(self, repository: str) -> bool:
        if repository not in self.hub.repositories:
            self._fail(401, "RepoNotFound")  # as the hub: whether it is private is not told
            return True
        token = self.headers.get("Authorization", "")
        if repository in self.hub.gated and token != "Bearer hf_member":
            self._fail(403 if token else 401, "GatedRepo")
            return True
        return False

    def _send_info(self, repository: str, rest: list[str]) -> None:
        if repository not in self.hub.repositories:
            self._fail(401, "RepoNotFound")
            return
        files = self.hub.repositories[repository]
        if rest[:1] == ["tree"]:
            self._send_json([_tree_entry(name, content) for name, content in files.items()])
            return
        siblings = [{"rfilename": name, "size": len(each)} for name, each in files.items()]
        commit = self.hub.commit(repository)
        self._send_json({"id": repository, "sha": commit, "siblings": siblings, "private": False})

    def _send_file(self, repository: str, name: str, *, has_body: bool) -> None:
        if self._is_refused(repository):
            return
        if name not in self.hub.repositories[repository]:
            self._fail(404, "EntryNotFound")
            return
        content = self._content(repository, name)
        headers = {
            "X-Repo-Commit": self.hub.commit(repository),
            "ETag": f'"{_etag(name, content)}"',
        }
        if not name.endswith(LARGE):
            self._send(200, content, headers, has_body=has_body)
            return
        headers |= {
            "X-Linked-ETag": headers["ETag"],
            "X-Linked-Size": str(len(content)),
            # Another host, as far as the client can see: it follows such a redirect for data only.
            "Location": f"{self.hub.url}/cdn/{repository}/{name}".replace("127.0.0.1", "localhost"),
        }
        self._send(302, b"", headers, has_body=has_body)

    def _send_large(self, content: bytes, *, has_body: bool) -> None:
        """Send a file or the rest of it; the connection may break within."""
        begin = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        size, rest = len(content), content[begin:]
        headers = {"Accept-Ranges": "bytes", "ETag": '"cdn"'}
        if "Range" in self.headers:
            headers["Content-Range"] = f"bytes {begin}-{size - 1}/{size}"
        cut, self.hub.cut_after = self.hub.cut_after, None
        status = 206 if "Range" in self.headers else 200
        if cut is None:
            self._send(status, rest, headers, has_body=has_body)
            return
        self._send(status, rest, headers, has_body=False)
        self.wfile.write(rest[:cut])
        self.close_connection = True

    def _send_json(self, content: object) -> None:
        headers = {"Content-Type": "application/json"}
        self._send(200, json.dumps(content).encode(), headers, has_body=True)

    def _fail(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code}, has_body=True)

    def _send(
        self, status: int, content: bytes, headers: dict[str, str], *, has_body: bool
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if has_body and self.command != "HEAD":
            self.wfile.write(content)


def _etag(name: str, content: bytes) -> str:
    return (hashlib.sha256 if name.endswith(LARGE) else hashlib.sha1)(content).hexdigest()


def _tree_entry(name: str, content: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"type": "file", "path": name, "size": len(content)}
    entry["oid"] = hashlib.sha1(content).hexdigest()
    if name.endswith(LARGE):
        entry["lfs"] = {"oid": _etag(name, content), "size": len(content), "pointerSize": 100}
    return entry
