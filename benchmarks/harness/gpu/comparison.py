"""Published rows beside the model's figures, with the assumption that decides each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from edgellm.build.verify_tree_size import GPUS, LARGEST, accepted, best_size
from harness.gpu import model
from harness.gpu.model import BOARDS, MAX_TOKENS, ORIN, THOR, TODAY, WAYS, Board, Case
from harness.gpu.published import ROWS, SHAPES, Row, why_no_prompt, why_not
from harness.results import Report

PLAIN_GOAL, DRAFTED_GOAL, PROMPT_GOAL = 0.95, 1.0, 0.8  # of the published figure
OUTPUT = 256  # tokens of an output after which a figure is taken
PROMPT = 370  # tokens where none are published
# Rows that the fit takes: plain decoding of one sequence with NVFP4.
FITTED = tuple(
    row
    for row in ROWS
    if (row.release, row.precision, row.way, row.batch) == ("0.4.0", "nvfp4", "plain", 1)
    and "-VL-" not in row.model
)
_MEMORY = ("weights", "head", "cache", "sums", "states", "draft")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What the model says of a row."""

    rate: float  # tokens/s of all sequences
    prompt_ms: float  # of all prompts; 0 if none is published or known
    nodes: int  # of a tree; 1: no tree
    decides: str
    decides_prompt: str


def figures(board: Board, row: Row) -> Figures:
    """Return the figures of a row that `why_not` accepts."""
    prompt = row.prompt_tokens // row.batch
    case = Case(
        precision=row.precision,
        shape=SHAPES[row.model],
        context=(prompt or PROMPT) + OUTPUT,
        batch=row.batch,
        nodes=_nodes(board, row),
    )
    is_known = prompt and not why_no_prompt(row)
    prompts = model.prompt_parts_ms(board, case, prompt) if is_known else {}
    parts, tokens = _parts(board, case, row)
    return Figures(
        rate=model.tokens_per_s(parts, row.batch * tokens),
        prompt_ms=row.batch * sum(prompts.values()),
        nodes=case.nodes,
        decides=_decides(board, parts, case),
        decides_prompt=_decides(board, prompts, case) if prompts else "",
    )


def _nodes(board: Board, row: Row) -> int:
    """Return the nodes of a tree: the default limit, and room for all in a pass."""
    if not row.way.startswith("eagle3"):
        return 1
    gpu = {THOR.name: GPUS[110], ORIN.name: GPUS[87]}[board.name]
    limit = best_size(gpu) if row.precision == "int4" else LARGEST
    return min(limit, MAX_TOKENS // row.batch)


def _parts(board: Board, case: Case, row: Row) -> tuple[Mapping[str, float], float]:
    """Return the parts of a step's time, and the tokens that a sequence gets of it."""
    if row.way.startswith("eagle3"):
        tokens = row.accepted * accepted(case.nodes) / accepted(LARGEST)
        return model.round_parts_ms(board, case), tokens
    if row.way == "mtp":
        return model.mtp_parts_ms(board, case), row.accepted
    return model.plain_parts_ms(board, case), 1.0


def _decides(board: Board, parts: Mapping[str, float], case: Case) -> str:
    """Return the assumption behind the largest part."""
    few, many = board.rates[case.precision]
    share = board.int4_share if case.precision == "int4" else board.share
    rate = f"{few:g}" if few == many else f"{few:g} to {many:g}"
    named = {
        f"{share:.0%} of the bandwidth": sum(parts.get(kind, 0.0) for kind in _MEMORY),
        f"products at {rate} TFLOP/s": parts.get("products", 0.0),
        f"{board.launch_us} us a launch": parts["launches"],
        f"{board.small_us:g} us a small kernel": parts.get("tree", 0.0),
        f"{board.wait_us:g} us a wait": parts["waits"],
        f"attention at {board.attention_shares[0]:.0%} of the peak": parts.get("attention", 0.0),
    }
    found = [max(named, key=lambda name: named[name])]
    if "attention" in parts:
        return found[0]
    tokens = case.batch * case.nodes
    if case.precision == "int4" and 1 < tokens <= model.FEW_TOKENS:
        found.append(f"{tokens} tokens as fast as one")
    if 1 < case.nodes < LARGEST:
        found.append(f"{case.nodes} nodes give {accepted(case.nodes) / accepted(LARGEST):.0%}")
    return "; ".join(found)


def fitted(rows: Sequence[Row] = FITTED) -> Board:
    """Return Thor with the bandwidth share and the time of a launch that rows imply.

    Least squares of relative errors. It takes the launches of edgellm's engines for theirs, since
    TensorRT compiles both.
    """
    sides, times = [], []
    for row in rows:
        case = Case(
            precision=row.precision,
            shape=SHAPES[row.model],
            context=row.prompt_tokens + OUTPUT,
        )
        step, ms = model.base_pass(case, 1), 1e3 / row.rate - THOR.wait_us / 1e3
        sides.append([sum(step.gigabytes.values()) / ms, step.launches / ms])
        times.append(1.0)
    (per_gb, launch_ms), *_ = np.linalg.lstsq(np.array(sides), np.array(times), rcond=None)
    share = 1e3 / per_gb / THOR.gb_per_s
    return replace(THOR, share=share, int4_share=share, launch_us=1e3 * launch_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A row with the model's figures, before and after the fit."""

    row: Row
    why_not: str
    found: Figures | None
    fitted: Figures | None  # of rows of Thor

    @property
    def ratio(self) -> float:
        """Return predicted by published tokens/s."""
        assert self.found is not None
        return self.found.rate / self.row.rate

    @property
    def prompt_ratio(self) -> float:
        """Return published by predicted time of the prompts."""
        assert self.found is not None
        return self.row.prompt_ms / self.found.prompt_ms


def compare() -> list[Compared]:
    """Return all rows with their figures."""
    boards, after, found = {board.name: board for board in BOARDS}, fitted(), []
    for row in ROWS:
        reason, board = why_not(row), boards[row.board]
        found.append(
            Compared(
                row=row,
                why_not=reason,
                found=None if reason else figures(board, row),
                fitted=None if reason or board is not THOR else figures(after, row),
            )
        )
    return found


def add_tables(report: Report, rows: Sequence[Compared]) -> None:
    """Report the goals, then each row's tokens/s and prompts."""
    goals = ["rows", "goal", "number", "below", "lowest", "its row", "decided by"]
    report.add("gpu-model-goals", goals, _goals(rows))
    head = ["release", "board", "model", "precision", "way", "sequences"]
    speed = [*head, "nodes", "published tokens/s", "predicted", "ratio", "fitted", "decided by"]
    report.add("gpu-model-speed", speed, map(_speed, rows))
    prompts = [*head, "tokens", "published ms", "predicted", "ratio", "fitted", "decided by"]
    distinct = {_key(each.row): each for each in reversed(rows) if each.row.prompt_tokens}
    report.add("gpu-model-prompts", prompts, map(_prompt, reversed(distinct.values())))


def _key(row: Row) -> tuple[object, ...]:
    """Return what rows with another precision of the image encoder share."""
    way = row.way.partition(",")[0]
    return row.release, row.model, row.precision, way, row.batch, row.prompt_ms


def _goals(rows: Sequence[Compared]) -> Iterator[list[str]]:
    kinds: list[tuple[str, str, float, Callable[[Compared], float]]] = [
        (f"{way} on {board}", f"{way},{board}", goal, lambda each: each.ratio)
        for board in (THOR.name, ORIN.name)
        for way, goal in (("plain", PLAIN_GOAL), ("eagle3", DRAFTED_GOAL), ("mtp", DRAFTED_GOAL))
    ]
    kinds += [("prompts on Thor", f",{THOR.name}", PROMPT_GOAL, lambda each: each.prompt_ratio)]
    for name, kind, goal, ratio in kinds:
        way, _, board = kind.partition(",")
        chosen = [
            each
            for each in rows
            if each.found is not None
            and each.row.way.startswith(way)
            and each.row.board == board
            and (way or each.found.prompt_ms)
        ]
        if not chosen:
            continue
        lowest = min(chosen, key=ratio)
        assert lowest.found is not None
        decides = lowest.found.decides if way else lowest.found.decides_prompt
        row = lowest.row
        shown = f"{row.release} {row.model} {row.precision}, {row.batch}"
        below = sum(ratio(each) < goal for each in chosen)
        counts = str(len(chosen)), str(below)
        yield [name, f"{goal:g}", *counts, f"{ratio(lowest):.2f}", shown, decides]


def _head(row: Row) -> list[str]:
    way = row.way.replace(",vit-fp8", ", FP8 images")
    return [row.release, row.board, row.model, row.precision, way, str(row.batch)]


def _speed(each: Compared) -> list[str]:
    row, found = each.row, each.found
    if found is None:
        return [*_head(row), "", f"{row.rate:g}", "", "", "", each.why_not]
    nodes = str(found.nodes) if found.nodes > 1 else ""
    after = f"{each.fitted.rate / row.rate:.2f}" if each.fitted is not None else ""
    shown = [nodes, f"{row.rate:g}", f"{found.rate:.1f}", f"{each.ratio:.2f}", after]
    return [*_head(row), *shown, found.decides]


def _prompt(each: Compared) -> list[str]:
    row, found = each.row, each.found
    tokens, ms = str(row.prompt_tokens), f"{row.prompt_ms:g}"
    if found is None or not found.prompt_ms:
        return [*_head(row), tokens, ms, "", "", "", why_no_prompt(row)]
    after = f"{row.prompt_ms / each.fitted.prompt_ms:.2f}" if each.fitted is not None else ""
    shown = [tokens, ms, f"{found.prompt_ms:.1f}", f"{each.prompt_ratio:.2f}", after]
    return [*_head(row), *shown, found.decides_prompt]


def show_ways(context: int, capacity: int) -> None:
    """Print Llama-3.1-8B's speed by configuration, and the parts of its time."""
    for board in BOARDS:
        for precision in board.precisions:
            given = Case(precision=precision, context=context, capacity=capacity)
            limit = model.roofline(board, given)
            print(f"\n{board.name}, {precision}: roofline {limit:.1f} tokens/s")
            for way in WAYS:
                case = replace(given, way=way)
                plain, drafted = (
                    parts(board, case) for parts in (model.plain_parts_ms, model.round_parts_ms)
                )
                print(
                    f"  {way.name:30} plain {model.tokens_per_s(plain):6.1f}  "
                    f"EAGLE3 {model.tokens_per_s(drafted, accepted(LARGEST)):6.1f}"
                )
            if precision == "int4":
                _show_sizes(board, given)
            for name, parts in (
                ("a token", model.plain_parts_ms),
                ("a round", model.round_parts_ms),
            ):
                shown = ", ".join(f"{kind} {ms:.2f}" for kind, ms in parts(board, given).items())
                print(f"  of the last, ms {name}: {shown}")


def _show_sizes(board: Board, given: Case) -> None:
    """Print speeds by the nodes of a tree."""
    for nodes in (8, 16, 32):
        drafted = model.round_parts_ms(board, replace(given, way=TODAY, nodes=nodes))
        rate = model.tokens_per_s(drafted, accepted(nodes))
        print(f"  {f'with {nodes} nodes':30} {'':12}  EAGLE3 {rate:6.1f}")


def slow_int4_ratios() -> dict[str, float]:
    """Return predicted by published tokens/s of EAGLE3, if 16 tokens take as long as 8 published.

    By model, for INT4 on Thor. Plain decoding of eight sequences says how long Edge-LLM's INT4
    products of 8 tokens take; those of TensorRT are not known.
    """
    rates = {
        (row.model, row.way, row.batch): row
        for row in ROWS
        if (row.board, row.release, row.precision) == (THOR.name, "0.4.0", "int4")
    }
    found = {}
    for (name, way, batch), row in rates.items():
        if way == "eagle3" and batch == 1 and (eight := rates.get((name, "plain", 8))):
            case = Case(
                precision="int4",
                shape=SHAPES[name],
                context=row.prompt_tokens + OUTPUT,
                nodes=_nodes(THOR, row),
            )
            parts, tokens = _parts(THOR, case, row)
            others = sum(parts.get(kind, 0.0) for kind in ("draft", "tree", "waits"))
            found[name] = 1e3 * tokens / (8e3 / eight.rate + others) / row.rate
    return found


def show_fit() -> None:
    """Print what published rows imply."""
    board = fitted()
    names = ", ".join(row.model for row in FITTED)
    print(
        f"\nfitted to {names}: {board.share:.1%} of {board.gb_per_s:g} GB/s, "
        f"{board.launch_us:.2f} us a launch; assumed are {THOR.share:.0%} and {THOR.launch_us} us"
    )
    slow = ", ".join(f"{name} {ratio:.2f}" for name, ratio in slow_int4_ratios().items())
    print(f"EAGLE3 with INT4, if 16 tokens take as long as published for 8: {slow} of published")


def published_llama(precision: str) -> tuple[float, float]:
    """Return the published tokens/s of Llama-3.1-8B on Thor: plain, and with EAGLE3."""
    plain, drafted = (
        next(
            row.rate
            for row in ROWS
            if (row.model, row.precision, row.way, row.batch) == ("Llama-3.1-8B", precision, way, 1)
        )
        for way in ("plain", "eagle3")
    )
    return plain, drafted
