"""The OpenAPI document: adds the responses, which FastAPI cannot derive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from edgellm.tools.serve.http.errors import MESSAGES

_OPENAI_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_TRITON_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "string"}},
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
_REFUSALS = {
    "400": "The request is invalid or unsupported.",
    "401": "No API key, or an unknown one.",
    "403": "The host name is foreign, or a page of another site sent the request.",
    "404": "There is no such model.",
}
_POST_REFUSALS = {
    "408": "The body did not come in time.",
    "413": "The body is too large.",
    "415": "The body is not JSON.",
    "422": "The request timed out before its first token.",
    "429": "Too many requests are waiting; Retry-After is the time to wait in seconds.",
    "500": "The engine failed.",
    "503": "The server is about to stop.",
    "504": "The engine was not loaded in time.",
}
_OBJECT = {"schema": {"type": "object"}}
_TEXT = {"schema": {"type": "string"}}
_STREAM: dict[str, Any] = {}  # OpenAPI 3.1 cannot say what the events of a stream hold


def document(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """A function that builds the document of an application once."""

    def made() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = get_openapi(title=app.title, version=app.version, routes=app.routes)
            for path, methods in found["paths"].items():
                for method, operation in methods.items():
                    operation["responses"] = _responses(path, method)
            app.openapi_schema = found
        return app.openapi_schema

    return made


def _responses(path: str, method: str) -> dict[str, Any]:
    error = _error(path)
    refusals = _REFUSALS | (_POST_REFUSALS if method == "post" else {})
    answers: dict[str, Any] = {
        status: {"description": text, "content": {"application/json": {"schema": error}}}
        for status, text in refusals.items()
    }
    answers["200"] = {"description": "The output."} | _content(path, method)
    if path in ("/health", "/ready"):
        answers["503"] = {"description": "Not ready.", "content": {"application/json": _OBJECT}}
    elif path.endswith("/ready"):
        answers["503"] = {"description": "Not ready."}
    return answers


def _error(path: str) -> dict[str, Any]:
    if path.startswith(MESSAGES):
        return _ANTHROPIC_ERROR
    return _TRITON_ERROR if path.startswith(("/v2/", "/api/")) else _OPENAI_ERROR


def _content(path: str, method: str) -> dict[str, Any]:
    if path == "/metrics":
        return {"content": {"text/plain": _TEXT}}
    if path.endswith("/generate_stream"):
        return {"content": {"text/event-stream": _STREAM}}
    if path.startswith("/v1/") and method == "post":
        text = {"text/plain": _TEXT} if path.startswith("/v1/audio/") else {}
        return {"content": {"application/json": _OBJECT, "text/event-stream": _STREAM, **text}}
    if path in ("/api/chat", "/api/generate"):
        return {"content": {"application/json": _OBJECT, "application/x-ndjson": _STREAM}}
    if path.endswith("/infer"):
        binary = {"schema": {"type": "string", "format": "binary"}}
        return {"content": {"application/json": _OBJECT, "application/octet-stream": binary}}
    if path.endswith(("/ready", "/live")) and path.startswith("/v2/"):
        return {}
    return {"content": {"application/json": _OBJECT}}
