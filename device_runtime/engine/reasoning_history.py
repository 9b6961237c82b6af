"""Reasoning of earlier turns, under the key that each family's chat template uses."""

from __future__ import annotations

import re
from typing import Any

from edgellm.device_runtime.text.reasoning_marks import CHANNEL, has_channels

# Qwen, GLM, EXAONE and Command use reasoning_content, gpt-oss thinking, vLLM's clients reasoning.
_NAMES = ("reasoning_content", "reasoning", "thinking")
_IN_CHANNEL = re.compile(
    r"<\|channel\|>\s*(\w+)[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>(.*?)"
    r"(?:<\|(?:end|return|call)\|>|(?=<\|(?:start|channel)\|>)|\Z)",
    re.DOTALL,
)


def with_reasoning(turn: dict[str, Any], template: str) -> dict[str, Any]:
    """A message with its reasoning, if any, under the template's key."""
    if turn.get("role") == "assistant" and has_channels(template):
        turn = _without_channels(turn)
    reasoning = next((turn[name] for name in _NAMES if turn.get(name)), None)
    if not isinstance(reasoning, str):
        return turn
    named = {**turn, **dict.fromkeys(_NAMES, reasoning)}
    content = turn["content"]
    if "[THINK]" in template and isinstance(content, str):  # Ministral: a part of the content
        thought = {"type": "thinking", "thinking": reasoning}
        texts = [{"type": "text", "text": content}] if content else []
        return {**named, "content": [thought, *texts]}
    if "<|channel|>" in template and turn.get("tool_calls") and content:
        # gpt-oss has one message before a call: its template rejects reasoning with a text.
        joined = dict.fromkeys(_NAMES, f"{reasoning}\n{content}")
        return {**named, **joined, "content": ""}
    return named


def _without_channels(turn: dict[str, Any]) -> dict[str, Any]:
    """Split an output of gpt-oss, whose template takes reasoning and text separately."""
    content = turn["content"]
    if not isinstance(content, str) or not content.lstrip().startswith((CHANNEL, "<|start|>")):
        return turn
    thoughts: list[str] = []
    texts: list[str] = []
    for channel, text in _IN_CHANNEL.findall(content):
        (thoughts if channel == "analysis" else texts).append(text)
    return {"thinking": "\n".join(thoughts), **turn, "content": "\n".join(texts)}
