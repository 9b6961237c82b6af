"""`edgellm-serve` under load, and its overhead over `llm_inference`'s loop.

    python benchmarks/serving.py --minutes 5 --clients 200 --queueSize 32      # SmolLM2
    python benchmarks/serving.py --engineDir ENGINE --minutes 0.5 --server_flags=--eagle --leave 0.2
    python benchmarks/serving.py --mixed --minutes 5 --clients 200 --leave 0.2 --queueSize 200

With `--mixed`, requests to the model of `make demo` have no, one or two pictures, for the base or
one of three adapters.

Load: streaming clients send requests, wait for Retry-After if they are rejected, and compare each
output with the engine's offline output. Some disconnect early. Afterwards no request may be running
and no KV cache block in use. The server's memory is sampled every half second; its slope is that of
the second half, by least squares.

Cost: one client and `llm_inference`'s loop alternate with the same requests. Three figures give the
server's share of the loop's tokens per second: the median over the pairs, the best times (other
programs only add time), and CPU time, which other processes hardly change. The client parses an
output after its clock has stopped.
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
from dataclasses import dataclass, field
from pathlib import Path

from load_requests import as_chat, mixed_requests, mixture, requests

from edgellm.device_runtime import LLM
from edgellm.device_runtime.engine.profile import Profile
from edgellm.device_runtime.requests.request_file import Options
from edgellm.device_runtime.requests.responses import run_request

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
    command = [sys.executable, "-m", "edgellm.tools.serve", "--engineDir", str(engine), *flags]
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


MODES = ("server", "loop")


@dataclass
class Cost:
    """Seconds of each request by round, through the server and without."""

    wall_s: dict[str, list[list[float]]]  # by mode, request and round
    cpu_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(MODES, 0.0))

    def rates(self) -> list[float]:
        """Return the server's tokens/s as a share of the loop's, for each pair."""
        server, loop = (itertools.chain(*self.wall_s[mode]) for mode in MODES)
        return [without / through for through, without in zip(server, loop, strict=True)]

    def best_rate(self) -> float:
        """Return the share of the best times of each request."""
        server, loop = (sum(map(min, self.wall_s[mode])) for mode in MODES)
        return loop / server


def cost(
    llm: LLM, server: tuple[int, int], wanted: list[dict], pool: list[Question], rounds: int
) -> Cost:
    """Measure the overhead of the server; the first round does not count."""
    port, pid = server
    found = Cost({mode: [[] for _ in wanted] for mode in MODES})
    for number in range(rounds + 1):
        for index, (raw, question) in enumerate(zip(wanted, pool, strict=True)):
            for mode in MODES if (number + index) % 2 else MODES[::-1]:
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


def smollm2_engine(work: Path, threads: int) -> Path:
    """Return an engine of SmolLM2 in float32; build it if missing."""
    from harness import checkpoints

    from edgellm.build.engine import build_engine
    from edgellm.build.plan import Plan
    from edgellm.export.graph.architecture import ExportOptions
    from edgellm.export.pipeline.llm import export_llm
    from edgellm.export.pipeline.resolve import open_checkpoint
    from edgellm.scripts import smollm2

    checkpoint, bundle, engine = (
        work / name for name in ("fp32", "serve-bundle", f"serve-engine-{threads}")
    )
    work.mkdir(parents=True, exist_ok=True)
    if not checkpoint.exists():
        checkpoints.float_checkpoint(str(smollm2.fetch()), checkpoint)
    if not engine.exists():
        export_llm(open_checkpoint(str(checkpoint)), bundle, ExportOptions("fp32"))
        build_engine("llm", bundle, engine, Plan(512, 1024, threads, "auto"), "onnxruntime", print)
    return engine


def main() -> None:
    """Print the figures; exit with code 1 if an output was wrong."""
    from edgellm.scripts import smollm2

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engineDir", type=Path, help="engine; default: SmolLM2 in float32")
    parser.add_argument(
        "--mixed", action="store_true", help="requests with pictures and adapters; needs make demo"
    )
    parser.add_argument("--work", type=Path, default=smollm2.cache_folder() / "benchmarks")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count(), help="threads of SmolLM2's engine"
    )
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--queueSize", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32, help="tokens of an output")
    parser.add_argument(
        "--leave", type=float, default=0.0, help="share of requests with an early disconnect"
    )
    parser.add_argument("--rounds", type=int, default=12, help="rounds of the comparison; 0: none")
    parser.add_argument(
        "--server_flags",
        default="--noContextReuse",
        help="flags of the server; default: no prefix cache, as in the loop",
    )
    given = parser.parse_args()
    flags = [*given.server_flags.split(), "--queueSize", str(given.queueSize)]
    if given.mixed:
        mixed = mixture(given.work, smollm2.cache_folder() / "demo", given.threads)
        engine, llm = mixed.engine, LLM(mixed.engine, multimodal_engine_dir=mixed.visual)
        for name, folder in mixed.adapters.items():
            llm.load_adapter(name, folder)
        wanted, given.rounds = mixed_requests(mixed, given.tokens), 0
        flags += mixed.flags
    else:
        engine = given.engineDir or smollm2_engine(given.work, given.threads)
        llm, wanted = LLM(engine), requests(16, given.tokens)
    pool = questions(llm, wanted)
    with serving(engine, *flags) as (port, pid):
        if given.rounds:
            print_cost(cost(llm, (port, pid), wanted[:8], pool[:8], given.rounds))
        report = asyncio.run(load(port, pid, pool, given.clients, given.minutes * 60, given.leave))
    answers = len({question.answer for question in pool})
    print(
        f"{given.clients} clients, {given.minutes:g} minutes, a queue of {given.queueSize}; ",
        end="",
    )
    print(f"{len(pool)} questions with {answers} answers")
    print_load(report)
    faults = report.seen["wrong"] + report.seen["broken"] + any(report.remaining.values())
    raise SystemExit(1 if faults else 0)


def print_cost(found: Cost) -> None:
    """Print the server's share of the loop's tokens per second."""
    rates = sorted(found.rates())
    # 95 % confidence interval of the median, by order statistics.
    off = min(int(0.98 * math.sqrt(len(rates)) + 0.5), (len(rates) - 1) // 2)
    middle = (len(rates) - 1) // 2
    low, high = rates[middle - off], rates[-1 - middle + off]
    print("tokens/s of the server as a share of the loop's:")
    print(f"  {statistics.median(rates):.3f} median of {len(rates)} pairs", end=" ")
    print(f"(95 %: {low:.3f} to {high:.3f})")
    print(f"  {found.best_rate():.3f} of the best times of each request")
    print(f"  {found.cpu_s['loop'] / found.cpu_s['server']:.3f} by processor time")


def print_load(report: Report) -> None:
    """Print the clients' results, and the server's resources."""
    seen = report.seen
    print(
        f"right {seen['answered']} ({report.tokens} events), refused {seen['refused']}, "
        f"wrong {seen['wrong']}, broken {seen['broken']}, left {seen['left']}"
    )
    print(f"running after them: {report.remaining}")
    half, last = report.rss[len(report.rss) // 2][1], report.rss[-1][1]
    print(
        f"memory {report.rss[0][1] / 1e6:.1f} MB, {half / 1e6:.1f} at half time, "
        f"{last / 1e6:.1f} at the end; slope of the last half "
        f"{report.slope_bytes_per_s() * 60 / 1e6:+.2f} MB/minute"
    )
    before, after = report.open_before, report.open_after
    print(f"open files {before[0]} -> {after[0]}, threads {before[1]} -> {after[1]}")
    for fault in report.faults[:5]:
        print(fault)


if __name__ == "__main__":
    main()
