"""Speculative methods against plain decoding on real prompts: tokens/s, acceptance length.

    pip install -e '.[dev]'
    python benchmarks/speculation.py speedup --prompts 20     # the first 20 of every set
    python benchmarks/speculation.py speedup --eagle1 DIR --medusa DIR --dflash DIR --dspark DIR
    python benchmarks/speculation.py stages --prompts 5 --threads 1     # milliseconds of a round
    python benchmarks/speculation.py context --contexts 256 4096 --windows 256  # long prompts
    python benchmarks/speculation.py recall --prompts 3 --ranks 64 128  # of low-rank heads
    python benchmarks/speculation.py low_rank --prompts 5 --ranks 64 128 --trained DIR
    python benchmarks/speculation.py simulated --shapes qwen2.5-0.5b 1b     # random weights

All methods run each prompt, and alternate in starting, so that ratios compare the same minutes of
the machine. In an fp32 engine, the outputs of all methods must be equal. EAGLE-3's draft is that of
examples/; edgellm-train-draft trains the others. `stages` measures processor time if there is one
thread. `context` puts stories before each prompt, and can give the draft another window. `recall`
counts how often low-rank heads retrieve the best tokens of that draft's head. `low_rank` compares
their speed with the whole head's. They are the SVD of the head, or were trained (`--trained`).
`simulated` runs a base and a draft of random weights, and replaces the draft's candidates: with a
given probability the first is right, else none is.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
from harness import command, prompts
from harness.models.engines import EAGLE3, PRECISIONS, drafted_engine, random_drafted_engine
from harness.models.random_weights import SHAPES
from harness.results import Report

from edgellm.device_runtime.api.generation_request import GenerationRequest
from edgellm.device_runtime.api.llm import LLM, RequestOutput
from edgellm.device_runtime.arrays import I64
from edgellm.device_runtime.engine import profile
from edgellm.device_runtime.engine.profile import GENERATION, SPECULATION, Profile
from edgellm.device_runtime.networks.draft import DraftNetwork, DraftPart, DraftResult
from edgellm.device_runtime.sampling.params import SamplingParams
from edgellm.device_runtime.speculate.drafters import eagle
from edgellm.device_runtime.speculate.drafters.eagle import EagleDrafter
from edgellm.device_runtime.speculate.options import SpecOptions
from edgellm.device_runtime.speculate.policy.static_tree import NAMED
from edgellm.device_runtime.speculate.shared_passes import Passes
from edgellm.device_runtime.speculate.tree import CandidatePool
from edgellm.export.checkpoints.lora_merge import floats
from edgellm.export.draft_checkpoints.low_rank_head import DOWN, UP, principal_inputs
from edgellm.export.pipeline.open_checkpoint import open_draft

DRAFTS = ("eagle3", "eagle1", "medusa", "dflash", "dspark")
DRAFT_MODEL = "int4"  # the same base, quantized; there is no smaller SmolLM2
ROOM = 1024  # tokens of a prompt and its output, after a long context


@dataclass(frozen=True, slots=True)
class Method:
    """A speculative method, and the draft in the engine's folder."""

    spec: SpecOptions | None
    draft: str = "eagle3"


_FIXED = SpecOptions(top_k=8, steps=5, verify_size=16, tree="fixed")
_FIXED_WITH_TEXT = SpecOptions(top_k=8, steps=6, verify_size=16, tree="fixed", lookups=("suffix",))
_EAGLE2 = SpecOptions(top_k=10, steps=6, verify_size=60, tree="fixed")
_CHOICES = NAMED["mc_sim_7b_63"]
_STATIC = SpecOptions(choices=_CHOICES)
_THREE_LEVELS = SpecOptions(choices=tuple(path for path in _CHOICES if len(path) <= 3))
METHODS = {
    "plain": Method(None),
    "ngram": Method(SpecOptions(network=None, lookups=("ngram",))),
    "suffix": Method(SpecOptions(network=None, lookups=("suffix",))),
    "eagle3-fixed": Method(_FIXED),
    "eagle3+suffix-fixed": Method(_FIXED_WITH_TEXT),
    "eagle3": Method(SpecOptions()),
    "eagle3+ngram": Method(SpecOptions(lookups=("ngram",))),
    "eagle3+suffix": Method(SpecOptions(lookups=("suffix",))),
    "eagle1-static": Method(_STATIC, "eagle1"),
    "eagle2": Method(_EAGLE2, "eagle1"),
    "eagle1": Method(SpecOptions(), "eagle1"),
    "medusa-static": Method(_THREE_LEVELS, "medusa"),  # heads with short training
    "medusa": Method(SpecOptions(), "medusa"),
    "dflash": Method(SpecOptions(), "dflash"),
    "dspark": Method(SpecOptions(), "dspark"),
    "dspark-fixed": Method(_FIXED, "dspark"),
    "model": Method(None),  # its options name an engine
    "auto": Method(SpecOptions(network="auto")),
}


@dataclass
class Tally:
    """Sums over prompts."""

    tokens: int = 0
    ms: float = 0.0
    rounds: int = 0
    emitted: int = 0
    nodes: int = 0
    ratios: list[float] = field(default_factory=list)  # to plain, prompt by prompt

    @property
    def rate(self) -> float:
        return self.tokens / self.ms * 1e3

    @property
    def length(self) -> float:
        return self.emitted / self.rounds if self.rounds else 1.0

    def add(self, answer: RequestOutput, plain_ms: float) -> None:
        """Add an output; `plain_ms`: time of a token without a draft."""
        decoded, ms = len(answer.token_ids) - 1, answer.profile.decode_ms()
        if decoded < 1:
            return
        rounds = answer.profile.rounds
        self.tokens += decoded
        self.ms += ms
        self.rounds += len(rounds)
        self.emitted += sum(counts.emitted for counts in rounds)
        self.nodes += sum(counts.tree_size for counts in rounds)
        self.ratios.append(plain_ms / (ms / decoded))


def measure(
    models: dict[str, LLM], questions: list[str], tokens: int, temperature: float
) -> tuple[dict[str, Tally], int]:
    """Run every prompt with every method; return sums, and the number of differing outputs."""
    tallies = {name: Tally() for name in models}
    names, differing = list(models), 0
    for index, question in enumerate(questions):
        sampling = SamplingParams(temperature=temperature, top_p=1.0, top_k=0, seed=index)
        turn = index % len(names)
        answers = {}
        for name in names[turn:] + names[:turn]:
            answers[name] = _answer(models[name], question, sampling, tokens)
        plain = answers["plain"]
        differing += any(other.token_ids != plain.token_ids for other in answers.values())
        plain_ms = plain.profile.decode_ms() / max(len(plain.token_ids) - 1, 1)
        for name, answer in answers.items():
            tallies[name].add(answer, plain_ms)
    return tallies, differing


def opened(
    work: Path, name: str, methods: list[str], drafts: dict[str, Path], threads: int
) -> dict[str, LLM]:
    """Open a model for each method of an engine."""
    needed = {METHODS[method].draft for method in methods}
    folders = {
        draft: drafted_engine(work, name, threads, drafts[draft]) for draft in sorted(needed)
    }
    models = {}
    for method in methods:
        spec, folder = METHODS[method].spec, folders[METHODS[method].draft]
        if method == "model":
            drafting = drafted_engine(work, DRAFT_MODEL, threads, drafts["eagle3"])
            spec = SpecOptions(network="draft", draft_engine_dir=drafting)
        models[method] = LLM(folder, spec=spec)
    return models


def _answer(model: LLM, question: str, sampling: SamplingParams, tokens: int) -> RequestOutput:
    """Run one request to its end."""
    answer = model.generate(
        [{"role": "user", "content": question}], sampling=sampling, max_generate_length=tokens
    )
    for _ in answer:
        pass
    return answer


def show_speedup(given: argparse.Namespace, report: Report) -> None:
    """Compare methods: tokens/s, ratio to plain decoding, acceptance length, verified nodes."""
    drafts = {draft: getattr(given, draft) for draft in DRAFTS}
    wanted = ["eagle3", "auto"] if given.quick else given.methods
    asked = ["plain", *(method for method in wanted if method != "plain")]
    methods = [method for method in asked if drafts[METHODS[method].draft] is not None]
    if missing := [method for method in asked if method not in methods]:
        print(f"left out, for want of their drafts: {', '.join(missing)}")
    rows: list[list[str]] = []
    for name in ["int4"] if given.quick else given.engines:
        own = [method for method in methods if (method, name) != ("model", DRAFT_MODEL)]
        models = opened(given.work, name, own, drafts, given.threads)
        for temperature in given.temperatures:
            for questions in _sets(given):
                loaded = prompts.load(questions)[: given.prompts]
                tallies, differing = measure(models, loaded, given.tokens, temperature)
                if differing:
                    print(f"{name}, {questions}: {differing} of {len(loaded)} outputs differ")
                rows += _rows([name, f"{temperature:g}", questions], tallies)
    columns = ("engine", "T", "set", "method", "tokens/s", "speedup", "median of prompts")
    report.add("speculation-methods", (*columns, "acceptance length", "verified nodes"), rows)


def _sets(given: argparse.Namespace) -> list[str]:
    return [prompts.OWN] if given.quick else given.sets


def _rows(where: list[str], tallies: dict[str, Tally]) -> list[list[str]]:
    """Return the figures of a set, and the ratio of "auto" to the best fixed method."""
    plain, rows = tallies["plain"].rate, []
    for method, tally in tallies.items():
        nodes = tally.nodes / tally.rounds if tally.rounds else 1.0
        ratios = tally.rate / plain, statistics.median(tally.ratios)
        shown = [f"{each:.2f}" for each in (*ratios, tally.length)]
        rows.append([*where, method, f"{tally.rate:.1f}", *shown, f"{nodes:.1f}"])
    if "auto" in tallies and len(tallies) > 2:
        rates = {method: tally.rate for method, tally in tallies.items() if method != "auto"}
        best = max(rates, key=rates.__getitem__)
        print(f"auto / {best}, the best fixed choice: {tallies['auto'].rate / rates[best]:.3f}")
    return rows


def show_stages(given: argparse.Namespace, report: Report) -> None:
    """Measure the parts of a round: means, and medians of a stage's runs."""
    if given.threads == 1:
        profile.time = SimpleNamespace(perf_counter=time.thread_time)
    folder = drafted_engine(given.work, given.engine, given.threads)
    rows: list[list[str]] = []
    for method in ("plain", "eagle3") if given.quick else given.methods:
        if METHODS[method].draft != "eagle3" or method == "model":
            continue
        with LLM(folder, spec=METHODS[method].spec) as llm:
            for questions in _sets(given):
                total = _profile(llm, prompts.load(questions)[: given.prompts], given)
                rows += _stages([method, questions], total)
    columns = ("method", "set", "part of a round", "mean, ms", "median, ms")
    report.add("speculation-stages", columns, rows)


def _profile(llm: LLM, questions: list[str], given: argparse.Namespace) -> Profile:
    """Run all prompts, one after the other."""
    total = Profile()
    for seed, question in enumerate(questions):
        sampling = SamplingParams(temperature=given.temperatures[0], top_p=1.0, top_k=0, seed=seed)
        total.add(_answer(llm, question, sampling, given.tokens).profile)
    return total


def _stages(where: list[str], total: Profile) -> list[list[str]]:
    count = len(total.rounds) or len(total.stages_ms[GENERATION])
    tokens = f"round of {total.decoded_tokens() / count:.2f} tokens"
    rows = [[*where, tokens, f"{total.decode_ms() / count:.3f}", ""]]
    for name in (GENERATION, *SPECULATION):
        if samples := total.stages_ms.get(name):
            ms = sum(samples) / count, statistics.median(samples)
            rows.append([*where, name, *(f"{each:.3f}" for each in ms)])
    return rows


def show_context(given: argparse.Namespace, report: Report) -> None:
    """Measure trees of 16 nodes after long contexts, which the draft computes whole."""
    rows: list[list[object]] = []
    stories = "\n\n".join(reversed(prompts.kinds(quick=given.quick).values()))
    for window in given.windows or [None]:
        draft = _windowed(given.work, given.eagle3, window)
        length = max(given.contexts) + ROOM
        folder = drafted_engine(given.work, given.engine, given.threads, draft, length=length)
        shown = open_draft(str(draft)).config.get("sliding_window", "none")
        whole = mock.patch.object(EagleDrafter, "_skip_what_was_missed")  # also where it cannot pay
        with whole, LLM(folder, spec=_FIXED) as llm:
            for count in given.contexts:
                before = llm.tokenizer.decode(llm.tokenizer.encode_truncated(stories, count))
                for questions in _sets(given):
                    found = Tally()
                    for question in prompts.load(questions)[: given.prompts]:
                        answer = _answer_after(llm, before, question, given.tokens)
                        found.add(answer, plain_ms=1.0)
                    rows.append([shown, count, questions, f"{found.length:.2f}"])
                    print(*rows[-1], flush=True)
    columns = ("window of the draft", "tokens before the prompt", "set", "acceptance length")
    report.add("speculation-context", columns, rows)


def _windowed(work: Path, draft: Path, window: int | None) -> Path:
    """Return a copy of a draft with another window, 0: none; None: the draft itself."""
    if window is None:
        return draft
    folder = work / f"window-{window}" / draft.name
    shutil.copytree(draft, folder, dirs_exist_ok=True)
    path = folder / "config.json"
    config = json.loads(path.read_text("utf-8"))
    given = {"sliding_window": window, "use_sliding_window": True}
    for name in (*given, "layer_types"):
        config.pop(name, None)
    path.write_text(json.dumps(config | given if window else config), "utf-8")
    return folder


def _answer_after(llm: LLM, before: str, question: str, tokens: int) -> RequestOutput:
    """Run one request after a text, whose KV cache is kept for the next."""
    content = f"{before}\n\n{question}" if before else question
    text = llm.formatter.format([{"role": "user", "content": content}], {})
    answer = llm.generate_text(
        GenerationRequest(
            text=text,
            add_special_tokens=False,
            sampling=SamplingParams(temperature=0.0),
            max_generate_length=tokens,
            stop=(),
            system_prompt="".join(text.partition(before)[:2]) if before else None,
        )
    )
    for _ in answer:
        pass
    return answer


def show_recall(given: argparse.Namespace, report: Report) -> None:
    """Count the best tokens of the draft's head that low-rank heads retrieve."""
    folder = drafted_engine(given.work, given.engine, given.threads)
    hidden: list[np.ndarray] = []
    run = DraftNetwork.run_batch

    def recorded(network: DraftNetwork, parts: Sequence[DraftPart]) -> list[DraftResult]:
        results = run(network, parts)
        hidden.extend(result.hidden.copy() for result in results)
        return results

    with mock.patch.object(DraftNetwork, "run_batch", recorded), LLM(folder, spec=_FIXED) as llm:
        for questions in _sets(given):
            _profile(llm, prompts.load(questions)[: given.prompts], given)
    draft = open_draft(str(EAGLE3))
    head, norm = (floats(draft.tensors, f"{name}.weight") for name in ("lm_head", "norm"))
    states = np.concatenate(hidden)[: given.states]
    squares = np.square(states).mean(-1, keepdims=True) + draft.config["rms_norm_eps"]
    states = states / np.sqrt(squares) * norm
    svd = [("SVD", _svd(head, rank)) for rank in given.ranks]
    trained = [("trained", _factors(folder)) for folder in given.trained]
    rows = [
        [kind, str(len(factors[0].T)), str(count), *shares]
        for kind, factors in (*svd, *trained)
        for count, shares in _recall(states, head, factors, given.candidates).items()
    ]
    columns = ("factors", "rank", "candidates", "best token", "best 8 tokens", "probability")
    print(f"{len(states)} draft positions, {len(head)} tokens of {head.shape[1]} numbers")
    report.add("low-rank-recall", columns, rows)


def _svd(head: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the factors [D, R] and [V, R] of a head [V, D] by its SVD."""
    vectors = principal_inputs(head, rank)
    return vectors, head @ vectors


def _factors(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the factors [D, R] and [V, R] of a draft with a low-rank head."""
    tensors = open_draft(str(folder)).tensors
    return floats(tensors, f"{DOWN}.weight").T, floats(tensors, f"{UP}.weight")


def _recall(
    states: np.ndarray,
    head: np.ndarray,
    factors: tuple[np.ndarray, np.ndarray],
    counts: list[int],
) -> dict[int, list[str]]:
    """Return shares of tokens and probability that a low-rank head retrieves, by candidates.

    Args:
        states: normed, [N, D].
        head: [V, D].
        factors: of the low-rank head, [D, R] and [V, R].
        counts: numbers of candidates.
    """
    down, up, most = states @ factors[0], factors[1], max(counts)
    shares = {count: np.zeros(3) for count in counts}
    for begin in range(0, len(states), 256):
        part = slice(begin, begin + 256)
        logits, approximate = states[part] @ head.T, down[part] @ up.T
        chances = np.exp(logits - logits.max(-1, keepdims=True))
        chances /= chances.sum(-1, keepdims=True)
        retrieved = np.argsort(-approximate, -1)[:, :most]
        best = np.argsort(-logits, -1)[:, :8]
        for count in counts:
            kept = retrieved[:, :count]
            found = (best[:, :, None] == kept[:, None]).any(-1)
            covered = np.take_along_axis(chances, kept, -1).sum(-1)
            shares[count] += found[:, 0].sum(), found.mean(-1).sum(), covered.sum()
    return {
        count: [f"{share:.4f}" for share in sums / len(states)] for count, sums in shares.items()
    }


def show_low_rank(given: argparse.Namespace, report: Report) -> None:
    """Compare the whole head of the draft with low-rank heads: tokens/s, acceptance length."""
    rows: list[list[str]] = []
    for name in ["int4"] if given.quick else given.engines:
        whole = drafted_engine(given.work, name, given.threads)
        models = {"plain": LLM(whole), "whole head": LLM(whole, spec=SpecOptions())}
        for rank in given.ranks:
            folder = drafted_engine(given.work, name, given.threads, head_rank=rank)
            models[f"SVD, rank {rank}"] = LLM(folder, spec=SpecOptions())
        for draft in given.trained:
            folder = drafted_engine(given.work, name, given.threads, draft)
            rank = len(_factors(draft)[0].T)
            models[f"trained, rank {rank}"] = LLM(folder, spec=SpecOptions())
        for questions in _sets(given):
            loaded = prompts.load(questions)[: given.prompts]
            tallies, differing = measure(models, loaded, given.tokens, given.temperatures[0])
            if differing:
                print(f"{name}, {questions}: {differing} of {len(loaded)} outputs differ")
            rows += _rows([name, questions], tallies)
    columns = ("engine", "set", "head", "tokens/s", "speedup", "median of prompts")
    report.add("low-rank-speed", (*columns, "acceptance length", "verified nodes"), rows)


class SimulatedDrafter(EagleDrafter):
    """Runs the draft network, and replaces its candidates below tokens of the plain output."""

    output: Sequence[int] = ()  # of plain decoding
    rate = 0.5  # probability that the first candidate is right
    random = np.random.default_rng(0)

    def begin(self, token_ids: Sequence[int]) -> None:
        """See `Drafter.begin`."""
        super().begin(token_ids)
        self._emitted: int | None = None

    def remember(self, token_ids: list[int]) -> None:
        """See `Drafter.remember`."""
        super().remember(token_ids)
        self._emitted = 0 if self._emitted is None else self._emitted + len(token_ids)

    def _expand(self, pool: CandidatePool, levels: int) -> Passes[None]:
        self._right = {0: 0}  # nodes on the plain output, with their depths
        yield from super()._expand(pool, levels)

    def _add(self, pool: CandidatePool, parents: I64, found: DraftResult) -> I64:
        token_ids, width = found.token_ids.copy(), found.token_ids.shape[1]
        right: dict[int, int] = {}  # rows whose first candidate is right, with its depth
        for row, parent in enumerate(parents.tolist()):
            depth = self._right.get(parent)
            if depth is None or (self._emitted or 0) + depth >= len(self.output):
                continue
            wanted = self.output[(self._emitted or 0) + depth]
            token_ids[row][token_ids[row] == wanted] = wanted + 1  # no second one
            if self.random.random() < self.rate:
                token_ids[row, 0] = wanted
                right[row] = depth + 1
        chances = np.full(token_ids.shape, (1 - self.rate) / width)
        chances[:, 0] = self.rate
        nodes = pool.add(parents, token_ids, self._policy.scores(np.log(chances)), chances)
        self._right |= {int(nodes[row * width]): depth for row, depth in right.items()}
        return nodes


def show_simulated(given: argparse.Namespace, report: Report) -> None:
    """Measure speedups at given probabilities that a drafted token is right."""
    rows = []
    prompt = " ".join(f"{number}" for number in range(100))
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    eagle.EagleDrafter = SimulatedDrafter
    for shape in ["small"] if given.quick else given.shapes:
        folder = random_drafted_engine(given.work, shape, given.threads)
        with LLM(folder) as plain:
            SimulatedDrafter.output = _answer(plain, prompt, sampling, given.tokens).token_ids
            for rate in given.rates:
                SimulatedDrafter.rate = rate
                tallies = {"plain": Tally(), "eagle3": Tally()}
                with LLM(folder, spec=SpecOptions()) as drafted:
                    _answer(drafted, prompt, sampling, given.tokens)  # learns the rate
                    for _ in range(given.rounds):
                        before = _answer(plain, prompt, sampling, given.tokens)
                        after = _answer(drafted, prompt, sampling, given.tokens)
                        assert before.token_ids == after.token_ids
                        plain_ms = before.profile.decode_ms() / (len(before.token_ids) - 1)
                        tallies["plain"].add(before, plain_ms)
                        tallies["eagle3"].add(after, plain_ms)
                found = tallies["eagle3"]
                shown = f"{tallies['plain'].rate:.1f}", f"{found.rate:.1f}"
                speedup = f"{statistics.median(found.ratios):.2f}"
                nodes = f"{found.nodes / found.rounds:.1f}"
                rows.append([shape, f"{rate:g}", *shown, speedup, f"{found.length:.2f}", nodes])
    columns = ("shape", "chance", "plain tokens/s", "tokens/s", "speedup")
    report.add("speculation-simulated", (*columns, "acceptance length", "verified nodes"), rows)


MODES = {
    "speedup": show_speedup,
    "stages": show_stages,
    "context": show_context,
    "recall": show_recall,
    "low_rank": show_low_rank,
    "simulated": show_simulated,
}


def main() -> None:
    parser = command.parser(__doc__, MODES, rounds=1)
    for draft in DRAFTS:
        default = EAGLE3 if draft == "eagle3" else None
        parser.add_argument(f"--{draft}", type=Path, default=default, help="folder of the draft")
    parser.add_argument("--prompts", type=int, help="prompts of each set; default: all")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--engines", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--engine", choices=PRECISIONS, default="int4", help="of `stages` ...")
    parser.add_argument("--sets", nargs="+", choices=prompts.NAMES, default=list(prompts.NAMES))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0])
    parser.add_argument("--contexts", nargs="+", type=int, default=[256, 4096, 7168])
    parser.add_argument("--windows", nargs="+", type=int, help="of the draft; default: its own")
    parser.add_argument("--trained", nargs="+", type=Path, default=[], help="low-rank heads")
    parser.add_argument("--ranks", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--candidates", nargs="+", type=int, default=[32, 128, 512])
    parser.add_argument("--states", type=int, default=4096, help="draft positions of `recall`")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["qwen2.5-0.5b", "1b"])
    parser.add_argument("--rates", nargs="+", type=float, default=[0.6, 0.75, 0.9])
    command.run(parser, MODES, quick={"prompts": 1, "tokens": 24, "ranks": [64], "contexts": [32]})


if __name__ == "__main__":
    main()
