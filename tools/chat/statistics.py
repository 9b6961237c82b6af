"""Speed and size figures of one output and of a session."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm.core.manifest import Engine
from edgellm.device_runtime.api.llm import RequestOutput
from edgellm.device_runtime.engine.profile import PREFILL


@dataclass(slots=True, kw_only=True)
class Totals:
    """Sums over the outputs of a session."""

    answers: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    decoded_tokens: int = 0  # generated, without the first of each output
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    rounds: int = 0
    emitted_tokens: int = 0  # by the rounds
    latest: str = ""  # one line about the latest output

    def add(self, output: RequestOutput) -> None:
        """Count an output, finished or stopped."""
        profile = output.profile
        self.answers += 1
        self.prompt_tokens += output.prompt_token_count
        self.reused_tokens += sum(profile.reused_tokens)
        self.generated_tokens += len(output.token_ids)
        self.decoded_tokens += max(len(output.token_ids) - 1, 0)
        self.prefill_ms += profile.total_ms(PREFILL)
        self.decode_ms += profile.decode_ms()
        self.rounds += len(profile.rounds)
        self.emitted_tokens += sum(counts.emitted for counts in profile.rounds)
        self.latest = describe(output)


def describe(output: RequestOutput) -> str:
    """Describe an output in one line, also before it is finished."""
    timings, count = output.timings(), len(output.token_ids)
    if not count:
        return f"prefill of {output.prompt_token_count} tokens"
    words = [f"{count} tokens"]
    if rate := timings["generation_tokens_per_second"]:
        words.append(f"{rate:.1f} tokens/s")
    if length := timings.get("spec_acceptance_length"):
        words.append(f"acceptance {length:.2f}")
    return ", ".join(words)


def context(used_tokens: int, manifest: Engine) -> str:
    """Return used and total tokens of the KV cache."""
    return f"context {used_tokens} of {manifest.max_kv_cache_capacity}"


def statistics(totals: Totals, used_tokens: int, manifest: Engine) -> list[str]:
    """Return the figures of a session, one a line."""
    computed = totals.prompt_tokens - totals.reused_tokens
    lines = [
        f"answers: {totals.answers}, {totals.generated_tokens} tokens",
        f"prompts: {totals.prompt_tokens} tokens, {totals.reused_tokens} of them reused; "
        f"{_rate(computed, totals.prefill_ms)} tokens/s",
        f"decoding: {_rate(totals.decoded_tokens, totals.decode_ms)} tokens/s",
    ]
    if totals.rounds:
        length = totals.emitted_tokens / totals.rounds
        lines.append(f"acceptance length: {length:.2f} in {totals.rounds} rounds")
    return [*lines, f"{context(used_tokens, manifest)} tokens"]


def _rate(tokens: int, milliseconds: float) -> str:
    return f"{tokens / milliseconds * 1e3:.1f}" if milliseconds else "0"
