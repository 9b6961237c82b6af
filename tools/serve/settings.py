"""Settings of a server: access, limits, timeouts."""

from __future__ import annotations

import hashlib
import ipaddress
import math
from dataclasses import dataclass, field
from pathlib import Path

from edgellm.core.errors import EdgeLLMError, RequestError
from edgellm.core.strict_json import parse
from edgellm.device_runtime.api.generation_request import GenerationDefaults

MIN_KEY_LENGTH = 8
_DEFAULTS = """give an object, such as '{"temperature": 0.6, "top_k": 20}'"""
TEXT_BODY_BYTES, MEDIA_BODY_BYTES = 1 << 20, 32 << 20


@dataclass(frozen=True, slots=True)
class ImageRules:
    """Allowed sources of images besides `data:` URIs."""

    folders: tuple[Path, ...] = ()  # resolved; `file://` URIs into them
    hosts: frozenset[str] = frozenset()  # host or host:port of http and https URLs


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a server, apart from its engines."""

    key_hashes: frozenset[bytes] = frozenset()  # SHA-256 of the keys; empty: no key is needed
    local_only: bool = True  # reject host names other than this machine's
    queue_size: int = 32  # maximum of waiting requests
    request_timeout_s: float = 300.0  # the engine's time for one request
    total_timeout_s: float = 900.0  # from arrival to the last byte
    body_timeout_s: float = 30.0
    max_body_bytes: int = TEXT_BODY_BYTES
    origins: frozenset[str] = frozenset()  # origins of allowed web pages; "*": all
    images: ImageRules = field(default_factory=ImageRules)
    memory_bytes: float = math.inf  # budget of all loaded engines
    lora_folders: tuple[Path, ...] = ()  # resolved; clients may load adapters from within


def read_keys(path: Path) -> frozenset[bytes]:
    """SHA-256 of the keys in a file, one a line; skips empty lines and lines with #.

    Raises:
        EdgeLLMError: the file has no key, or a key is too short or not ASCII.
    """
    try:
        lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
    except FileNotFoundError:
        raise EdgeLLMError(
            f"--apiKeyFile: there is no {path}", hint="make one with: openssl rand -hex 24 > FILE"
        ) from None
    except UnicodeDecodeError:
        raise EdgeLLMError(f"{path} is not text", hint="write one key in a line") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise EdgeLLMError(f"{path} holds no key", hint="write one key in a line")
    if not all(key.isascii() and key.isprintable() for key in keys):
        raise EdgeLLMError(
            f"{path}: a key has characters that a header cannot carry", hint="use ASCII only"
        )
    if min(map(len, keys)) < MIN_KEY_LENGTH:
        raise EdgeLLMError(
            f"{path}: a key has fewer than {MIN_KEY_LENGTH} characters",
            hint="make one with: openssl rand -hex 24",
        )
    return frozenset(key_hash(key) for key in keys)


def read_defaults(text: str | None) -> GenerationDefaults:
    """Defaults of requests from the JSON of `--overrideGenerationConfig`.

    Raises:
        EdgeLLMError: it is not a JSON object of options and their values.
    """
    flag = "--overrideGenerationConfig"
    try:
        values = {} if text is None else parse(text)
    except ValueError as error:
        raise EdgeLLMError(f"{flag} is not valid JSON: {error}", hint=_DEFAULTS) from None
    if not isinstance(values, dict):
        raise EdgeLLMError(f"{flag} is not a JSON object", hint=_DEFAULTS)
    try:
        return GenerationDefaults.of(values)
    except RequestError as error:
        raise EdgeLLMError(f"{flag}: {error}", hint=error.hint) from None


def key_hash(key: str) -> bytes:
    """SHA-256 of a key; keys are stored and compared by it."""
    return hashlib.sha256(key.encode()).digest()


def is_loopback(host: str) -> bool:
    """Whether an address or a name can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def require_safe(host: str, *, has_keys: bool, allow_no_key: bool) -> None:
    """Raise `EdgeLLMError` if other machines could use the server without a key."""
    if not (is_loopback(host) or has_keys or allow_no_key):
        raise EdgeLLMError(
            f"--host {host} lets other machines in without a key",
            hint="give --apiKeyFile, or --allowNoKey to accept all clients",
        )
