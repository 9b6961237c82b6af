"""Attack the product with random seeds for a given time, and write one report.

python tests/adversary/run.py --minutes 60
python tests/adversary/run.py --only broken_files --seed 7 --case 12
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
import time
from pathlib import Path

# This folder has a module with the name of a package that others import.
sys.path = [place for place in sys.path if place != str(Path(__file__).parent)]
_TESTS = Path(__file__).parents[1]
sys.path += [str(_TESTS), str(_TESTS / "support"), str(_TESTS.parent / "benchmarks")]

from adversary.attack import NAMES, Result, try_case  # noqa: E402 - the path comes first
from adversary.workshop import Workshop  # noqa: E402 - the path comes first

MAX_FINDINGS = 20  # of an attack, which ends then


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10, help="For how long. [10]")
    parser.add_argument("--only", choices=NAMES, action="append", help="This attack. [all]")
    parser.add_argument("--seed", type=int, default=None, help="Of all cases. [from the time]")
    parser.add_argument("--case", type=int, default=None, help="This case alone, again.")
    parser.add_argument("--report", type=Path, help="FILE.json or FILE.md.")
    parser.add_argument("--folder", type=Path, default=Path(".adversary"), help="For all files.")
    given = parser.parse_args()
    os.environ.update({"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"})
    seed = int(time.time()) if given.seed is None else given.seed
    names = given.only or list(NAMES)
    workshop = Workshop(given.folder.resolve() / "workshop")
    try:
        if given.case is not None:
            results = [_try(workshop, names[0], seed, given.case)]
        else:
            results = _for(given.minutes * 60 / len(names), workshop, names, seed)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        workshop.close()
    write_report(given.report or given.folder / "report.md", results)
    sys.exit(1 if any(result.finding for result in results) else 0)


def _for(seconds: float, workshop: Workshop, names: list[str], seed: int) -> list[Result]:
    """Cases of each attack until its time is over."""
    results: list[Result] = []
    for name in names:
        end, number, own = time.monotonic() + seconds, 0, list[Result]()
        while time.monotonic() < end and sum(bool(one.finding) for one in own) < MAX_FINDINGS:
            own.append(_try(workshop, name, seed, number))
            number += 1
        results += own
        sys.stdout.write(f"{summary(name, own)}\n")
    return results


def _try(workshop: Workshop, name: str, seed: int, number: int) -> Result:
    folder = workshop.folder.parent / "cases" / f"{name}-{seed}-{number}"
    result = try_case(workshop, name, seed, number, folder)
    if result.finding:
        sys.stdout.write(f"FINDING {result.command}\n{result.finding}\n")
        sys.stdout.flush()
    return result


def summary(name: str, results: list[Result]) -> str:
    """One line of an attack."""
    findings = sum(bool(result.finding) for result in results)
    kinds = len(outcomes(results))
    return f"{name}: {len(results)} cases, {findings} findings; {kinds} kinds of outcomes"


def outcomes(results: list[Result]) -> dict[str, int]:
    """Counts of each outcome, without findings."""
    tried = collections.Counter(result.tried for result in results if not result.finding)
    return dict(sorted(tried.items()))


def write_report(path: Path, results: list[Result]) -> None:
    """Counts by attack and outcome; each finding with its command."""
    by_attack: dict[str, list[Result]] = collections.defaultdict(list)
    for result in results:
        by_attack[result.attack].append(result)
    findings = [result for result in results if result.finding]
    if path.suffix == ".md":
        lines = ["# Report of the adversary", ""]
        for name, own in by_attack.items():
            lines.append(f"* {summary(name, own)}")
            lines += [f"    * {count} x {tried}" for tried, count in outcomes(own).items()]
        for result in findings:
            lines += ["", f"## `{result.command}`", "", "```", result.finding, "```"]
        path.write_text("\n".join(lines) + "\n")
        return
    content = {
        "attacks": {
            name: {
                "cases": len(own),
                "findings": sum(bool(result.finding) for result in own),
                "outcomes": outcomes(own),
            }
            for name, own in by_attack.items()
        },
        "findings": [{"command": result.command, "finding": result.finding} for result in findings],
    }
    path.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
