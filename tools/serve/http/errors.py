"""Errors of requests in the form of each protocol."""

from __future__ import annotations

import difflib
import http
import re
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.params import Form
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from edgellm.core.errors import (
    EdgeLLMError,
    LimitError,
    PromptLengthError,
    RequestError,
    suggestion,
)

_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
    404: "not_found_error", 405: "invalid_request_error", 408: "timeout_error",
    413: "invalid_request_error", 415: "invalid_request_error", 422: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error", 504: "timeout_error",
}  # fmt: skip

_ANTHROPIC_TYPES = {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"  # with their own error bodies

# Hints for fields with limited support.
_REMEDIES = {
    "n": "send several requests with different seeds",
    "best_of": "only 1 is supported",
    "tool_choice": 'give "auto", "none", "required" or a function\'s name',
    "prompt": "give a text, its token ids, or a list of either",
}
_MAX_PATH, _NEAR = 100, 0.5  # characters; least similarity of the nearest route
_GZIP = b"\x1f\x8b"
_LITERAL = re.compile("'([^']*)'")
_SUFFIX = "suffix: the model continues a text; it cannot fill a gap before a suffix"


class ApiError(Exception):
    """An error with an HTTP status and a reason."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.details = details  # of Anthropic's errors
        self.headers = {"Retry-After": str(retry_after_s)} if retry_after_s is not None else {}
        if status == http.HTTPStatus.UNAUTHORIZED:
            self.headers["WWW-Authenticate"] = "Bearer"

    @property
    def kind(self) -> str:
        """OpenAI's `type`."""
        return _TYPES.get(self.status, "server_error")


def as_api_error(error: Exception) -> ApiError:
    """The error that a client gets; reveals no internals of the server."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, (RequestError, LimitError)):
        hint = f" ({error.hint})" if error.hint else ""
        code = "context_length_exceeded" if isinstance(error, PromptLengthError) else None
        return ApiError(400, f"{error}{hint}", code=code)
    if isinstance(error, EdgeLLMError):
        return ApiError(500, str(error), code="engine_failed")
    return ApiError(500, "the server failed; its log says why", code="internal_error")


def _text(error: Exception) -> str:
    """The message, with escaped lone surrogates, which UTF-8 cannot encode."""
    return str(error).encode("utf-8", "backslashreplace").decode()


def openai_body(error: ApiError) -> dict[str, Any]:
    """OpenAI's error body: `{"error": ...}`."""
    detail = {"message": _text(error), "type": error.kind, "param": error.param, "code": error.code}
    return {"error": detail}


def body_for(path: str, error: ApiError) -> dict[str, Any]:
    """The error body in the form of the path's protocol."""
    if path.startswith(("/v2/", "/api/")):
        return {"error": _text(error)}
    if path.startswith(MESSAGES):
        kind = _ANTHROPIC_TYPES.get(error.status, error.kind)
        # Anthropic has no codes: its clients find this text, and shorten the conversation.
        too_long = "prompt is too long: " * (error.code == "context_length_exceeded")
        detail: dict[str, Any] = {"type": kind, "message": too_long + _text(error)}
        if error.details is not None:
            detail["details"] = error.details
        return {"type": "error", "error": detail}
    return openai_body(error)


def streamed_body_for(path: str, error: ApiError) -> dict[str, Any]:
    """The error event of a stream that has started."""
    if path == RESPONSES:
        detail = openai_body(error)["error"]
        return {**detail, "type": "error", "code": error.code or error.kind}
    return body_for(path, error)


def response_for(path: str, error: ApiError) -> JSONResponse:
    """The response to a failed request."""
    return JSONResponse(body_for(path, error), error.status, error.headers)


def install(app: FastAPI) -> None:
    """Add error handlers for all protocols to an application."""

    async def known(request: Request, error: Exception) -> JSONResponse:
        return response_for(request.url.path, as_api_error(error))

    async def http_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        detail = str(error.detail)
        if isinstance(error.__cause__, UnicodeDecodeError):
            detail = _not_text(error.__cause__)
        elif isinstance(error.__cause__, RecursionError):
            detail = "the body is nested too deeply"
        if error.status_code == http.HTTPStatus.NOT_FOUND:
            detail = _not_found(app, request)
        answer = response_for(request.url.path, ApiError(error.status_code, detail))
        answer.headers.update(error.headers or {})
        return answer

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return response_for(request.url.path, _invalid(request, error))

    async def converted(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ValidationError)  # of a body converted to another protocol's
        return response_for(request.url.path, fault_of(error.errors()))

    app.add_exception_handler(ApiError, known)
    app.add_exception_handler(ValidationError, converted)
    app.add_exception_handler(EdgeLLMError, known)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, invalid)


def _not_text(error: UnicodeDecodeError) -> str:
    if error.object.startswith(_GZIP):
        return "the body is compressed with gzip: send it as it is, without content-encoding"
    return f"the body is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}"


def _not_found(app: FastAPI, request: Request) -> str:
    """The message of a 404, with the nearest route."""
    routes = [each for each in app.routes if isinstance(each, APIRoute) and each.include_in_schema]
    path, known = request.url.path[:_MAX_PATH], {each.path: each for each in routes}
    ours = [one for one in known if request.method in (known[one].methods or ())] or [*known]
    nearest = difflib.get_close_matches(path, ours, n=1, cutoff=_NEAR)
    meant = ""
    if nearest:
        method = min(known[nearest[0]].methods or ["GET"])
        meant = f"did you mean {method} {nearest[0]}? "
    return f"there is no {path} here; {meant}GET /openapi.json lists all"


def _fault(errors: Sequence[Any], given: Any) -> Any:
    """The error to tell of: the first, or in a union that of the alternative that was meant.

    Args:
        errors: pydantic's.
        given: the body that they are of.
    """
    first = errors[0]
    for size in _tags(first, given):
        stem = first["loc"][:size]
        inside = [one for one in errors if len(one["loc"]) > size and one["loc"][:size] == stem]
        if len({one["loc"][size] for one in inside}) > 1:
            return _of_union(inside, stem, given)
    return first


def _of_union(errors: Sequence[Any], stem: tuple[Any, ...], given: Any) -> Any:
    """The error of the alternative that was meant, of a value at `stem`."""
    # An error of the value's whole type says that another alternative was meant.
    size = len(stem)
    within = [
        one for one in errors if len(one["loc"]) > size + 1 or not one["type"].endswith("_type")
    ]
    if within:
        deepest = max(within, key=lambda one: len(one["loc"]))
        return _fault([one for one in within if one["loc"][size] == deepest["loc"][size]], given)
    kinds = dict.fromkeys(one["msg"].removeprefix("Input should be a valid ") for one in errors)
    return {**errors[0], "loc": stem, "msg": "Input should be a valid " + " or ".join(kinds)}


def _tags(error: Any, given: Any) -> list[int]:
    """Where the path of an error has the name of an alternative, which the body has not."""
    value, found = given, list[int]()
    for at, part in enumerate(error["loc"]):
        if _has(value, part):
            value = value[part]
        elif at or part != "body":
            found.append(at)
    return found


def _place(error: Any, given: Any) -> list[str]:
    """The path of an error in the body, without names of alternatives."""
    value, found = given, list[str]()
    last = len(error["loc"]) - 1
    for at, part in enumerate(error["loc"]):
        if part == "body" and at == 0:
            continue
        if _has(value, part):
            value = value[part]
        elif at != last or not isinstance(value, dict):
            continue
        found.append(str(part))
    return found


def _has(value: Any, part: Any) -> bool:
    if isinstance(value, list):
        return isinstance(part, int) and part < len(value)
    return isinstance(value, dict) and part in value


def _invalid(request: Request, error: RequestValidationError) -> ApiError:
    """The error of an invalid body, with the field's path."""
    body = getattr(request.scope.get("route"), "body_field", None)
    if body is not None and isinstance(body.field_info, Form):
        return _invalid_form(error, body.field_info.annotation)
    if "json" not in request.headers.get("content-type", "json"):
        return ApiError(415, "the body must be JSON: send content-type: application/json")
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return ApiError(
            400, f"the body is not valid JSON: {reason} at character {first['loc'][-1]}"
        )
    return fault_of(error.errors(), body and body.field_info.annotation, error.body)


def _invalid_form(error: RequestValidationError, form: Any) -> ApiError:
    """The error of an invalid form, whose lists have a field for each part."""
    given = error.body if isinstance(error.body, FormData) else FormData()
    found = fault_of(error.errors(), form, {key: given.getlist(key) for key in given})
    if "file" not in given or isinstance(given["file"], str):
        # Also of a body of another content type
        return ApiError(
            400, "file: send the audio file as a part of multipart/form-data", param="file"
        )
    return found


def fault_of(errors: Sequence[Any], body: Any = None, given: Any = None) -> ApiError:
    """The error of invalid fields.

    Args:
        errors: pydantic's list of errors.
        body: the model of the body, for suggestions; None: unknown.
        given: the body itself, for paths; None: unknown.
    """
    first = errors[0] if given is None else _fault(errors, given)
    place = [str(part) for part in first["loc"] if part != "body" and "[" not in str(part)]
    place = place if given is None else _place(first, given)
    if first["type"] == "union_tag_invalid":
        place, reason = [*place, "type"], _unknown_type(first["ctx"])
    else:
        reason = first["msg"][:1].lower() + first["msg"][1:]
    if place[:1] == ["suffix"]:
        return ApiError(400, _SUFFIX, param="suffix")
    if (remedy := _REMEDIES.get(place[0] if place else "")) is not None:
        reason += f" ({remedy})"
    elif meant := _meant(first, body):
        reason += f" ({meant})"
    if not place:
        return ApiError(400, f"the body: {reason}")
    # Names of unknown fields come from the client: only the message has them.
    param = place[0] if place[0].isidentifier() and place[0].isascii() else None
    return ApiError(400, f"{'.'.join(place)}: {reason}", param=param)


def _unknown_type(context: Any) -> str:
    """The reason of an unknown `type` of an object, with the one that was probably meant."""
    tag, expected = context["tag"], context["expected_tags"]
    known = _LITERAL.findall(expected)
    words = (f"input should be {expected}", suggestion(tag, known))
    return f"{words[0]} ({words[1]})" if words[1] else words[0]


def _meant(error: Any, body: Any) -> str:
    """The field or value that was probably meant, as a question; "" for no guess."""
    if error["type"] == "literal_error":
        return suggestion(str(error["input"]), _LITERAL.findall(error["ctx"]["expected"]))
    if error["type"] != "extra_forbidden":
        return ""
    *above, name = (part for part in error["loc"] if part != "body")
    models = {*_models(body)}
    for part in above:  # names of fields, indices, and names of a union's parts
        fields = [model.model_fields[part] for model in models if part in model.model_fields]
        models = {one for each in fields for one in _models(each.annotation)} or models
    known = {field.alias or key for model in models for key, field in model.model_fields.items()}
    return suggestion(str(name), sorted(known))


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models in a type, such as those of a list or union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)
