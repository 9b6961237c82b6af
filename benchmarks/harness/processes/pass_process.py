"""Engines under test with one small interface, each in its own process.

`python pass_process.py KIND PATH THREADS [CONTEXT]` reads commands from stdin ("prefill 512",
"decode 64", "both 64", "verify 8": passes of 8 tokens) and writes one JSON list of milliseconds
each. The caller alternates between the processes, so that a slow minute of a shared machine affects
all of them.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

CONTEXT = 512  # tokens in the KV cache during decoding
EXTRA_SLOTS = 1536  # slots of the KV cache after the context
BATCH = 512  # tokens of a prefill pass of llama.cpp
VERIFIED = 8  # passes of "verify"


class Engine(Protocol):
    def prefill(self, token_ids: list[int]) -> None: ...

    def decode(self, token_id: int) -> None: ...

    def verify(self, token_ids: list[int]) -> None:
        """Run tokens after the context, all with logits, and forget them; not for `GenAI`."""


class EdgeLLM:
    """edgellm's session, including argmax and its copy to the host."""

    def __init__(self, path: str, threads: int, context: int) -> None:
        from edgellm.core.manifest import LLM_ENGINE, load_engine
        from edgellm.device_runtime.networks.decoder import open_decoder

        del context  # the engine was built for it
        manifest = load_engine(Path(path), LLM_ENGINE)
        assert manifest.options["threads"] == threads
        self.session = open_decoder(Path(path), manifest)
        self.prefill_rows = manifest.prefill_rows
        self.length = 0

    def prefill(self, token_ids: list[int]) -> None:
        rows, step = np.array(token_ids), self.prefill_rows
        for begin in range(0, len(rows), step):
            piece = rows[begin : begin + step]
            result = self.session.run(piece, begin, np.array([len(piece) - 1]))
        self.length, _ = len(token_ids), int(result.token_ids[0])

    def decode(self, token_id: int) -> None:
        result = self.session.run(np.array([token_id]), self.length, np.array([0]))
        self.length, _ = self.length + 1, int(result.token_ids[0])

    def verify(self, token_ids: list[int]) -> None:
        rows = np.arange(len(token_ids))
        int(self.session.run(np.array(token_ids), self.length, rows).token_ids[0])


class LlamaCpp:
    """llama.cpp's C interface: one decode call and the argmax of its logits."""

    def __init__(
        self, path: str, threads: int, context: int, *, flash_attention: bool = False
    ) -> None:
        import llama_cpp

        self.api = llama_cpp
        self.model = llama_cpp.Llama(
            path, n_ctx=context + EXTRA_SLOTS, n_batch=BATCH, n_ubatch=BATCH, n_threads=threads,
            n_threads_batch=threads, flash_attn=flash_attention, verbose=False,
        )  # fmt: skip
        self.context = self.model._ctx.ctx
        self.vocab = self.model.n_vocab()
        self.length = 0

    def _run(self, token_ids: list[int], *, all_logits: bool = False) -> None:
        batch = self.api.llama_batch_init(len(token_ids), 0, 1)
        batch.n_tokens = len(token_ids)
        for index, token_id in enumerate(token_ids):
            batch.token[index], batch.pos[index] = token_id, self.length + index
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
            batch.logits[index] = all_logits or index == len(token_ids) - 1
        if self.api.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")
        logits = self.api.llama_get_logits_ith(self.context, -1)
        int(np.ctypeslib.as_array(logits, shape=(self.vocab,)).argmax())
        self.api.llama_batch_free(batch)
        self.length += len(token_ids)

    def prefill(self, token_ids: list[int]) -> None:
        self.model._ctx.kv_cache_clear()
        self.length = 0
        for begin in range(0, len(token_ids), BATCH):
            self._run(token_ids[begin : begin + BATCH])

    def decode(self, token_id: int) -> None:
        self._run([token_id])

    def verify(self, token_ids: list[int]) -> None:
        before = self.length
        self._run(token_ids, all_logits=True)
        self.api.llama_memory_seq_rm(self.api.llama_get_memory(self.context), 0, before, -1)
        self.length = before


class GenAI:
    """onnxruntime-genai's generator, greedy."""

    def __init__(self, path: str, threads: int, context: int) -> None:
        import onnxruntime_genai as og

        config = og.Config(path)
        config.overlay(
            json.dumps(
                {"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}
            )
        )
        self.og, self.model = og, og.Model(config)
        self.capacity = context + EXTRA_SLOTS
        self.generator = None

    def prefill(self, token_ids: list[int]) -> None:
        params = self.og.GeneratorParams(self.model)
        params.set_search_options(max_length=self.capacity, do_sample=False)
        self.generator = self.og.Generator(self.model, params)
        self.generator.append_tokens(np.array(token_ids, np.int32))
        self.generator.get_logits()

    def decode(self, token_id: int) -> None:
        del token_id  # greedy: the generator feeds its own token
        self.generator.generate_next_token()


KINDS: dict[str, Callable[[str, int, int], Engine]] = {
    "edgellm": EdgeLLM,
    "llama.cpp": LlamaCpp,
    "llama.cpp, flash attention": partial(LlamaCpp, flash_attention=True),
    "genai": GenAI,
}


MODULES = {
    "edgellm": ("onnxruntime", "edgellm.device_runtime.networks.decoder"),
    "llama.cpp": ("llama_cpp",),
    "llama.cpp, flash attention": ("llama_cpp",),
    "genai": ("onnxruntime_genai",),
}


class Process:
    """An engine in its own process."""

    def __init__(
        self,
        python: str,
        kind: str,
        path: Path,
        threads: int,
        script: str = __file__,
        *,
        context: int | None = None,
    ) -> None:
        command = [python, script, kind, str(path), str(threads)]
        if context is not None:
            command.append(str(context))
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.opening = self._read()  # seconds of imports and until ready, anonymous bytes

    def measure(self, what: str, count: int) -> list[float]:
        """Return milliseconds of the forward passes of a command."""
        return self.ask(f"{what} {count}")

    def resident_bytes(self) -> int:
        """Return the memory of the process, mapped files included."""
        return self.ask("resident 0")[0]

    def ask(self, line: str) -> list:
        """Return the reply to a line."""
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> list:
        while line := self._process.stdout.readline():
            if line.startswith("["):
                return json.loads(line)
        raise RuntimeError(f"{self._process.args} ended")


def _timed(function: Callable[[], None]) -> float:
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e3


def _status_bytes(field: str) -> int:
    """Return a field of this process's status: `RssAnon` (memory that no file backs), `VmRSS`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = (line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return int(found) << 10


def main() -> None:
    kind, path, threads, *given = sys.argv[1:]
    context = int(given[0]) if given else CONTEXT
    start = time.perf_counter()
    for name in MODULES[kind]:
        importlib.import_module(name)
    imported = time.perf_counter()
    engine = KINDS[kind](path, int(threads), context)
    ready = time.perf_counter()
    prompt = [1000 + i % (1 << 14) for i in range(context)]
    engine.prefill(prompt[:CONTEXT])
    print(json.dumps([imported - start, ready - imported, _status_bytes("RssAnon")]), flush=True)
    for line in sys.stdin:
        what, count = line.split()
        if what == "resident":
            samples = [_status_bytes("VmRSS")]
        elif what == "prefill":
            samples = [_timed(lambda: engine.prefill(prompt[: int(count)]))]  # noqa: B023
        elif what == "verify":
            nodes = [2000 + at for at in range(int(count))]
            samples = [_timed(lambda: engine.verify(nodes)) for _ in range(VERIFIED)]  # noqa: B023
        else:
            first = _timed(lambda: engine.prefill(prompt))
            engine.decode(2000)
            samples = [_timed(lambda t=t: engine.decode(2000 + t)) for t in range(int(count))]
            if what == "both":
                samples.insert(0, first)
        print(json.dumps(samples), flush=True)


if __name__ == "__main__":
    main()
