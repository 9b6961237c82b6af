"""Concurrent clients of another library's engine, in a process of its own.

`python client_process.py NAME PATH` reads a `Load` as JSON and writes its `figures`. The engines of
onnxruntime-genai and vLLM batch. llama.cpp's Python binding runs its one context for one client at
a time.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MOST = 16  # clients
TOPICS = ("the sea", "a bicycle", "bread", "the moon", "a robot", "rain", "chess", "a library")


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of a measurement."""

    clients: int
    tokens: int  # of an output
    seconds: float
    threads: int
    texts: list[str] | None  # None: `prompts`


class Questions:
    """Prompts of clients until the time is over or no prompt is left."""

    def __init__(self, load: Load) -> None:
        self._texts = prompts() if load.texts is None else iter(load.texts)
        self._end = time.monotonic() + load.seconds

    def take(self, maximum: int) -> Iterator[str]:
        """Yield at most `maximum` prompts."""
        for _ in range(maximum):
            if time.monotonic() < self._end and (text := next(self._texts, None)):
                yield text


@dataclass(frozen=True, slots=True)
class Seen:
    """One output as its client received it, in seconds of one clock."""

    asked: float
    times: list[float]  # of events, each with one or several tokens
    tokens: int


def figures(answers: list[Seen], cpu_s: float, clients: int) -> dict[str, float]:
    """Return tokens/s while all clients were busy; latencies and CPU time in milliseconds."""
    if len(answers) <= 2 * clients:
        raise SystemExit(f"{len(answers)} answers of {clients} clients: give more --seconds")
    begin = max(one.times[-1] for one in answers[:clients])
    end = min(one.times[-1] for one in answers[-clients:])
    tokens = sum(
        one.tokens / len(one.times) for one in answers for time_s in one.times
        if begin < time_s <= end
    )  # fmt: skip
    counted = answers[clients:]
    first = sorted(one.times[0] - one.asked for one in counted)
    gaps = sorted(b - a for one in counted for a, b in itertools.pairwise(one.times))
    found = {"tokens/s": tokens / (end - begin)}
    found["cpu"] = cpu_s * 1e3 / sum(one.tokens for one in answers)
    for name, waits in (("first", first), ("next", gaps)):
        for share in (50, 99):
            place = min(len(waits) * share // 100, len(waits) - 1)
            found[f"{name} p{share}"] = waits[place] * 1e3
    return found


def prompts() -> Iterator[str]:
    """Yield distinct prompts, which share only the template as a prefix."""
    for number in itertools.count(2):
        topic = TOPICS[number % len(TOPICS)]
        yield f"{number}. Explain to a child what is interesting about {topic}, in {number} words."


def _chat(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def run_genai(path: str, load: Load) -> tuple[list[Seen], float]:
    """Run onnxruntime-genai's Engine, with one request for each client."""
    import numpy as np
    import onnxruntime_genai as og

    config = og.Config(path)
    settings: dict[str, Any] = {
        "model": {"decoder": {"session_options": {"intra_op_num_threads": load.threads}}}
    }
    settings["engine"] = {"static_batching": {"max_batch_size": MOST}}
    config.overlay(json.dumps(settings))
    model = og.Model(config)
    tokenizer, engine, questions = og.Tokenizer(model), og.Engine(model), Questions(load)
    buffer = engine.create_event_buffer(4 * MOST)
    running, answers, used_s = [], [], time.process_time()

    def begin(text: str) -> None:
        request = engine.create_request()
        options = og.TurnOptions(request)
        options.set_max_generated_tokens(load.tokens)
        options.set_min_generated_tokens(load.tokens)
        options.set_do_sample(False)
        running.append((request, time.monotonic(), []))
        request.begin_turn(np.array(tokenizer.encode(_chat(text)), np.int32), options)

    while True:
        for text in questions.take(load.clients - len(running)):
            begin(text)
        if not running:
            return answers, time.process_time() - used_s
        for event in engine.run(buffer):
            entry = next(one for one in running if one[0] == event.request)
            flags = og.EngineEventFlags
            if int(event.flags) & int(flags.TOKEN):
                entry[2].append(time.monotonic())
            if int(event.flags) & int(flags.TURN_FINISHED):
                answers.append(Seen(entry[1], entry[2], len(entry[2])))
                running.remove(entry)
                entry[0].close()


def run_llama(path: str, load: Load) -> tuple[list[Seen], float]:
    """Run llama.cpp's one context, for one client at a time."""
    from llama_cpp import Llama

    llama = Llama(
        path, n_ctx=2048, n_threads=load.threads, n_threads_batch=load.threads, verbose=False
    )
    answers, questions, used_s = list[Seen](), Questions(load), time.process_time()
    line = deque((time.monotonic(), text) for text in questions.take(load.clients))
    while line:
        asked, text = line.popleft()
        llama.reset()
        ids = llama.tokenize(_chat(text).encode(), special=True)
        generated = llama.generate(ids, temp=0.0, repeat_penalty=1.0)
        times = [time.monotonic() for _ in itertools.islice(generated, load.tokens)]
        answers.append(Seen(asked, times, len(times)))
        line.extend((time.monotonic(), text) for text in questions.take(1))
    return answers, time.process_time() - used_s


def run_vllm(path: str, load: Load) -> tuple[list[Seen], float]:
    """Step vLLM's engine, with one request for each client."""
    sys.path.pop(0)  # modules of this folder would shadow vLLM's imports
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{load.threads - 1}"
    from vllm import EngineArgs, LLMEngine, SamplingParams

    engine = LLMEngine.from_engine_args(
        EngineArgs(path, dtype="bfloat16", max_model_len=1024, max_num_seqs=MOST)
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=load.tokens, ignore_eos=True)
    names, questions, running = map(str, itertools.count()), Questions(load), dict[str, Seen]()
    answers, used_s = list[Seen](), time.process_time()
    while True:
        for text in questions.take(load.clients - len(running)):
            name = next(names)
            running[name] = Seen(time.monotonic(), [], load.tokens)
            engine.add_request(name, _chat(text), sampling)
        if not running:
            return answers, time.process_time() - used_s
        for output in engine.step():
            running[output.request_id].times.append(time.monotonic())
            if output.finished:
                answers.append(running.pop(output.request_id))


RUNNERS = {"genai": run_genai, "llama": run_llama, "vllm": run_vllm}


def main() -> None:
    name, path = sys.argv[1:]
    load = Load(**json.load(sys.stdin))
    print(json.dumps(figures(*RUNNERS[name](path, load), load.clients)))


if __name__ == "__main__":
    main()
