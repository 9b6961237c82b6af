"""`/tokenize` and `/detokenize`, in vLLM's form."""

from __future__ import annotations

from typing import Annotated, Any

import anyio.to_thread
from pydantic import Field

from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.engine import continuation
from edgellm.tools.serve import tool_calls
from edgellm.tools.serve.engines.ask import EngineRequest
from edgellm.tools.serve.http.errors import ApiError
from edgellm.tools.serve.protocols.openai.chat import messages_of
from edgellm.tools.serve.schemas.openai import Message, Templated
from edgellm.tools.serve.schemas.response_format import Body
from edgellm.tools.serve.schemas.sampling import TokenId
from edgellm.tools.serve.schemas.tools import Tool
from edgellm.tools.serve.settings import ImageRules


class TokenizeRequest(Templated):
    """A plain text, or messages for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None  # vLLM's default: for plain texts only
    return_token_strs: bool | None = None
    # For messages only.
    tools: list[Tool] | None = None

    async def token_ids(self, llm: LLM) -> list[int]:
        """The tokens of the text or of the rendered messages.

        Raises:
            ApiError: neither or both are given, or there are images, whose tokens need the engine.
            RequestError: the template rejects the messages.
        """
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "give prompt or messages", param="prompt")
        if self.prompt is not None:
            adds = self.add_special_tokens is not False
            return await _encoded(llm, self.prompt, add_special_tokens=adds)
        messages, images = await messages_of(self.messages or (), ImageRules())
        if images:
            raise ApiError(400, "messages: only text is counted here", param="messages")
        flags = self.variables(self.tools or (), llm.tokenizer)
        continuation.continues(messages, flags)
        template = llm.tokenizer.chat_template or ""
        messages = tool_calls.placed(template, messages, flags.get("tools", ()))
        text = await anyio.to_thread.run_sync(llm.formatter.format, messages, flags)
        return await _encoded(llm, text, add_special_tokens=bool(self.add_special_tokens))


class DetokenizeRequest(Body):
    """Token ids."""

    model: str | None = None
    tokens: list[TokenId]


async def tokenized(body: TokenizeRequest, llm: LLM) -> dict[str, Any]:
    """The response in vLLM's form: tokens, their count, and their names if requested."""
    found = await body.token_ids(llm)
    names = [llm.tokenizer.token_name(token_id) for token_id in found]
    return {
        "count": len(found),
        "max_model_len": llm.manifest.max_kv_cache_capacity,
        "tokens": found,
        "token_strs": names if body.return_token_strs else None,
    }


async def detokenized(body: DetokenizeRequest, llm: LLM) -> dict[str, Any]:
    """The response in vLLM's form: the text, including special tokens."""
    size = llm.manifest.decoder.vocab_size
    if unknown := [token_id for token_id in body.tokens if token_id >= size]:
        raise ApiError(400, f"tokens: the model has no token {unknown[0]}", param="tokens")
    return {
        "prompt": await anyio.to_thread.run_sync(
            lambda: llm.tokenizer.decode(body.tokens, skip_special_tokens=False)
        )
    }


async def count_of(ask: EngineRequest, llm: LLM) -> int:
    """Number of tokens of a conversation in the chat template.

    Raises:
        ApiError: it has images, whose tokens need the engine.
        RequestError: the template rejects the messages.
    """
    if ask.images:
        raise ApiError(400, "messages: only text is counted here", param="messages")
    assert isinstance(ask.prompt, list)
    text = await anyio.to_thread.run_sync(llm.formatter.format, ask.prompt, ask.template_flags)
    return len(await _encoded(llm, text, add_special_tokens=False))


async def _encoded(llm: LLM, text: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids, encoded in a thread, since a long text would block other clients."""
    return await anyio.to_thread.run_sync(
        lambda: llm.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    )
