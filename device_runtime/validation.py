"""Validation of arguments of the Python interface, before any work."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from edgellm.core.errors import RequestError
from edgellm.multimodal.media import Audio, Source, Video

MAX_STALL_MS = 100.0  # limit of a pass that prefills while other requests decode


def is_whole(value: object) -> bool:
    """Whether a value is a whole number; True and False are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether a value is a number; True and False are not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def require_kind(name: str, value: object, kind: type | tuple[type, ...], what: str) -> None:
    """Reject a value of another type; raises `RequestError`."""
    if not isinstance(value, kind):
        raise RequestError(f"{name} {value!r} is not {what}")


def require_length(name: str, value: Any) -> int:
    """Validate a number of tokens, at least 1; raises `RequestError`."""
    if not is_whole(value):
        raise RequestError(f"{name} {value!r} is not a whole number")
    if value < 1:
        raise RequestError(f"{name} {value} is less than 1")
    return int(value)


def batch(prompts: Any, sampling: Any) -> list[tuple[Any, Any]]:
    """Prompts with their sampling parameters; raises `RequestError`."""
    if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Sequence):
        raise RequestError(
            f"prompts {prompts!r} are not a list", hint="for one prompt there is `generate`"
        )
    if not isinstance(sampling, Sequence):
        return [(prompt, sampling) for prompt in prompts]
    if len(sampling) != len(prompts):
        raise RequestError(f"{len(sampling)} samplings for {len(prompts)} prompts")
    return list(zip(prompts, sampling, strict=True))


def text_list(name: str, value: Any) -> list[str]:
    """Validate a list of texts; a single text becomes a list. Raises `RequestError`."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise RequestError(f"{name} {value!r} is not a list of texts")
    return list(texts)


def media_sources(messages: Any) -> list[Source]:
    """Images, videos and audio of chat messages, in order.

    Raises:
        RequestError: a message is invalid; the error has its index and the fault.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, bytes) or not messages:
        raise RequestError(
            f"the prompt {messages!r} is neither a text nor a list of messages",
            hint='a message is {"role": "user", "content": "..."}',
        )
    found: list[Source] = []
    for at, message in enumerate(messages):
        place = f"messages[{at}]"
        require_kind(place, message, Mapping, "an object with `role` and `content`")
        if not isinstance(message.get("role"), str):
            raise RequestError(f"{place} has no `role`")
        content = message.get("content")
        if isinstance(content, str) or (content is None and message.get("tool_calls")):
            continue
        if not isinstance(content, (list, tuple)):
            raise RequestError(f"{place}.content {content!r} is not a text or a list of items")
        for index, item in enumerate(content):
            found += _media(f"{place}.content[{index}]", item)
    return found


def _media(place: str, item: Any) -> list[Source]:
    """The image, video or audio of a content item, if it is one."""
    require_kind(place, item, Mapping, "an object with `type`")
    kind = item.get("type")
    if kind == "text":
        require_kind(f"{place}.text", item.get("text"), str, "a text")
        return []
    if kind == "video":
        return [_video(place, item.get("video"))]
    if kind not in ("image", "audio"):
        raise RequestError(f"{place}.type {kind!r} is none of 'text', 'image', 'video' and 'audio'")
    require_kind(f"{place}.{kind}", item.get(kind), (str, os.PathLike), "a path or a URI")
    source = os.fspath(item[kind])
    return [source if kind == "image" else Audio(source)]


def _video(place: str, given: Any) -> Video:
    what = "a path, a URI, or a list of frames"
    require_kind(f"{place}.video", given, (str, os.PathLike, list, tuple), what)
    frames = given if isinstance(given, (list, tuple)) else [given]
    for frame in frames:
        require_kind(f"{place}.video", frame, (str, os.PathLike), what)
    paths = [os.fspath(frame) for frame in frames]
    return Video.of(paths if frames is given else paths[0])
