"""The parts that all attacks share: findings, random numbers of a case, the list of attacks."""

from __future__ import annotations

import importlib
import random
import shutil
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from adversary.workshop import Workshop

NAMES = ("families", "broken_files", "requests", "kills", "full_disk", "hooks")


class Finding(AssertionError):  # noqa: N818 - a verdict, which pytest shows as a failed test
    """A verdict against the product."""


class Attack(Protocol):
    """A module of this package.

    `SHARE`: how many cases of seed 0 belong to the test suite.
    """

    SHARE: int

    def attack(self, workshop: Workshop, number: int, rng: random.Random, folder: Path) -> str:
        """Try one case in an empty folder; return what was tried and the outcome.

        Args:
            workshop: engines and files that all cases share.
            number: of the case, which selects its kind.
            rng: gives everything that is random.
            folder: keeps the input of a case that fails.

        Raises:
            Finding: the verdict went against the product.
        """
        ...


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one case; `finding` is empty if the product was correct."""

    attack: str
    seed: int
    number: int
    tried: str
    finding: str

    @property
    def command(self) -> str:
        """The command that repeats the case."""
        again = f"--only {self.attack} --seed {self.seed} --case {self.number}"
        return f"python tests/adversary/run.py {again}"


def find(name: str) -> Attack:
    return cast(Attack, importlib.import_module(f"adversary.{name}"))


def try_case(workshop: Workshop, name: str, seed: int, number: int, folder: Path) -> Result:
    """Run one case; its folder is kept only if it fails."""
    rng = random.Random(f"{name}/{seed}/{number}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    module = find(name)
    try:
        tried = module.attack(workshop, number, rng, folder)
    except Finding as error:
        return Result(name, seed, number, "", str(error))
    except Exception:  # noqa: BLE001 - whatever reached the attack is a finding
        return Result(name, seed, number, "", traceback.format_exc())
    shutil.rmtree(folder, ignore_errors=True)
    return Result(name, seed, number, tried, "")


def require(holds: object, finding: str) -> None:
    """Raise the finding unless the verdict holds."""
    if not holds:
        raise Finding(finding)
