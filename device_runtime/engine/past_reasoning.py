"""Reasoning of earlier turns, under the name by which each family's chat template reads it."""

from __future__ import annotations

from typing import Any

# Qwen, GLM, EXAONE and Command say reasoning_content, gpt-oss thinking, vLLM's clients reasoning.
_NAMES = ("reasoning_content", "reasoning", "thinking")


def with_reasoning(turn: dict[str, Any], template: str) -> dict[str, Any]:
    """A message whose reasoning, if it has any, stands where the template looks for it."""
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
        # gpt-oss has one message before a call: its template refuses reasoning beside a text.
        joined = dict.fromkeys(_NAMES, f"{reasoning}\n{content}")
        return {**named, **joined, "content": ""}
    return named
