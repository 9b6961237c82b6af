"""`edgellm-serve` under load, and what it costs beside `llm_inference`'s loop.

    python benchmarks/serve.py                                # SmolLM2, 200 clients, 300 s
    python benchmarks/serve.py --engineDir ENGINE --clients 20 --seconds 30 --server_flags=--eagle

Load: so many streaming clients ask a server with a queue of 32, wait as long as Retry-After says
when they are refused, and compare every answer with the one that the engine gave offline. The
server's memory is read every half second; its slope is that of the second half.

Cost: one client and `llm_inference`'s loop answer the same requests in turn; the ratio of tokens
per second is the median over all answers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from edgellm.device_runtime import LLM
from edgellm.device_runtime.profile import Profile
from edgellm.device_runtime.requests import Options
from edgellm.device_runtime.runner import run_request

TOPICS = (
    "the sea", "a bicycle", "bread", "the moon", "a robot", "rain", "chess", "a library",
    "tea", "a bridge", "the colour green", "maps", "a clock", "snow", "a garden", "music",
)  # fmt: skip
GREETING = re.compile(r"http://127\.0\.0\.1:(\d+)")


@dataclass(frozen=True)
class Question:
    """One request, and the answer that the engine gives offline."""

    body: bytes
    answer: str


@dataclass
class Report:
    """What clients and the watcher of the server saw."""

    seen: Counter = field(default_factory=Counter)  # answered, refused, wrong, broken
    tokens: int = 0
    rss: list[tuple[float, int]] = field(default_factory=list)  # seconds, bytes
    faults: list[str] = field(default_factory=list)

    def slope_bytes_per_s(self) -> float:
        """Of the second half."""
        late = self.rss[len(self.rss) // 2 :]
        if len(late) < 2:
            return 0.0
        return statistics.linear_regression(*zip(*late, strict=True)).slope


def requests(count: int, tokens: int) -> list[dict]:
    """Requests as the request file has them; every second one is sampled."""
    return [
        {
            "messages": [{"role": "user", "content": f"Tell me {2 + index} things about {topic}."}],
            "temperature": 0.0 if index % 2 else 0.7,
            "seed": index,
            "max_generate_length": tokens,
            "top_p": 1.0,
            "top_k": 0,
        }
        for index, topic in zip(range(count), TOPICS * count, strict=False)
    ]


def as_chat(request: dict) -> bytes:
    """The same request in OpenAI's form."""
    body = {name: request[name] for name in ("messages", "temperature", "seed", "top_p", "top_k")}
    body |= {"max_tokens": request["max_generate_length"], "stream": True}
    return json.dumps(body).encode()


def questions(llm: LLM, wanted: list[dict]) -> list[Question]:
    """Requests with their offline answers."""
    found = [run_request(llm, Options(), raw, 0, Profile(), lambda *_: None) for raw in wanted]
    return [
        Question(as_chat(raw), answer["output_text"])
        for raw, answer in zip(wanted, found, strict=True)
    ]


@contextmanager
def serving(engine: Path, *flags: str) -> Iterator[tuple[int, int]]:
    """A server process: its port and its process id."""
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


async def ask(port: int, body: bytes) -> tuple[int, dict[str, str], str, int]:
    """One streamed chat over a connection of its own: status, headers, text, events with text."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        status = int((await reader.readline()).split()[1])
        headers = {}
        while (line := (await reader.readline()).decode().strip()) != "":
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        text, events = "", 0
        async for line in reader:
            if not line.startswith(b"data: {"):
                continue
            choice = json.loads(line[6:])["choices"][0]
            text += choice["delta"].get("content", "")
            events += 1
        return status, headers, text, events
    finally:
        writer.close()


async def client(
    port: int, pool: list[Question], end: float, report: Report, chance: random.Random
) -> None:
    """Ask until the time is over."""
    while time.monotonic() < end:
        question = chance.choice(pool)
        try:
            status, headers, text, events = await ask(port, question.body)
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
    """Memory of a process."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) * 1024


async def load(port: int, pid: int, pool: list[Question], clients: int, seconds: float) -> Report:
    """So many clients for so long."""
    report, begin = Report(), time.monotonic()
    end = begin + seconds
    tasks = [
        asyncio.create_task(client(port, pool, end, report, random.Random(number)))
        for number in range(clients)
    ]
    while time.monotonic() < end:
        report.rss.append((time.monotonic() - begin, rss_bytes(pid)))
        await asyncio.sleep(0.5)
    await asyncio.gather(*tasks)
    return report


def cpu_s(pid: int | str) -> float:
    """Processor time that a process has used, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass
class Cost:
    """The server beside the loop, answer by answer."""

    rates: list[float] = field(default_factory=list)  # its tokens/s as a share of the loop's
    cpu_s: dict[str, float] = field(default_factory=lambda: {"server": 0.0, "loop": 0.0})


def cost(
    llm: LLM, server: tuple[int, int], wanted: list[dict], pool: list[Question], rounds: int
) -> Cost:
    """What a request costs through the server, by the clock and in processor time.

    Server and loop take turns with every request, so that both see the same minute of the machine.
    """
    port, pid = server
    found = Cost()
    for number, (raw, question) in enumerate(list(zip(wanted, pool, strict=True)) * rounds):
        seconds = {}
        for mode in ("server", "loop") if number % 2 else ("loop", "server"):
            process = pid if mode == "server" else "self"
            begin, used = time.perf_counter(), cpu_s(process)
            if mode == "server":
                status, _, text, _ = asyncio.run(ask(port, question.body))
                assert (status, text) == (200, question.answer)
            else:
                run_request(llm, Options(), raw, 0, Profile(), lambda *_: None)
            seconds[mode] = time.perf_counter() - begin
            found.cpu_s[mode] += cpu_s(process) - used
        found.rates.append(seconds["loop"] / seconds["server"])
    return found


def smollm2_engine(work: Path, threads: int) -> Path:
    """SmolLM2 in float32, built if it is not there yet."""
    import weights

    from edgellm.build.engine import build_engine
    from edgellm.device_runtime.backends import Plan
    from edgellm.export.bundle import ExportOptions, export_llm
    from edgellm.export.source import open_checkpoint
    from edgellm.tools import smollm2

    checkpoint, bundle, engine = (work / name for name in ("fp32", "serve-bundle", "serve-engine"))
    work.mkdir(parents=True, exist_ok=True)
    if not checkpoint.exists():
        weights.float_checkpoint(str(smollm2.fetch()), checkpoint)
    if not engine.exists():
        export_llm(open_checkpoint(str(checkpoint)), bundle, ExportOptions("fp32"))
        build_engine(bundle, engine, Plan(512, 1024, threads, "auto"), "onnxruntime", print)
    return engine


def main() -> None:
    """Print the figures; exit code 1 if an answer was wrong."""
    from edgellm.tools import smollm2

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engineDir", type=Path, help="SmolLM2 in float32 without it")
    parser.add_argument("--work", type=Path, default=smollm2.cache_folder() / "benchmarks")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of SmolLM2's engine")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--rounds", type=int, default=7, help="of the comparison; 0 leaves it out")
    parser.add_argument(
        "--server_flags", default="--noContextReuse", help="the loop does not reuse rows, either"
    )
    given = parser.parse_args()
    engine = given.engineDir or smollm2_engine(given.work, given.threads)
    llm, wanted = LLM(engine), requests(16, given.tokens)
    pool = questions(llm, wanted)
    with serving(engine, *given.server_flags.split()) as (port, pid):
        if given.rounds:
            found = cost(llm, (port, pid), wanted[:8], pool[:8], given.rounds)
            used = found.cpu_s["server"] / found.cpu_s["loop"]
            print(f"tokens/s of the server over those of the loop: {_spread(found.rates)}")
            print(f"processor time of the server over that of the loop: {used:.3f}")
        report = asyncio.run(load(port, pid, pool, given.clients, given.seconds))
    print(f"{given.clients} clients, {given.seconds:.0f} s: {dict(report.seen)}")
    first, last = report.rss[0][1], report.rss[-1][1]
    slope = report.slope_bytes_per_s()
    print(f"memory {first / 1e6:.1f} -> {last / 1e6:.1f} MB, slope {slope / 1e3:+.2f} kB/s")
    for fault in report.faults[:5]:
        print(fault)
    raise SystemExit(1 if report.seen["wrong"] + report.seen["broken"] else 0)


def _spread(ratios: list[float]) -> str:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} (quartiles {low:.3f} and {high:.3f}, {len(ratios)} answers)"


if __name__ == "__main__":
    main()
