"""Backends that compile engines, one package each; `device_runtime.runners` runs the engines.

A package in `build` is a backend if it implements `Backend`.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from edgellm.build.plan import FLAG, Compiled, Estimate, Options, Origin, Plan
from edgellm.core.commands.progress import Report
from edgellm.core.errors import EdgeLLMError
from edgellm.core.manifest import Bundle, library_of
from edgellm.device_runtime import runners


class Backend(Protocol):
    """Interface of a backend's package."""

    LABEL: str  # the library's name, for users
    DEVICE: str  # that engines run on
    TAKES_STATES: bool  # whether it supports recurrent layers
    TAKES_MIXED_LAYERS: bool  # whether KV caches of layers may differ in shape, or be shared
    TAKES_AUDIO: bool  # whether it supports speech models
    Options: type[Options]  # its own flags

    def origin(self, options: Options) -> Origin:
        """Dependencies of compiled graphs; raises `EdgeLLMError` if the backend cannot work."""
        ...

    def takes_batches(self, plan: Plan) -> bool:
        """Whether a pass may have several sequences; called for `max_batch_size` above 1."""
        ...

    def takes_adapters(self, plan: Plan) -> bool:
        """Whether sequences may have different adapters; called for `max_lora_rank` above 0."""
        ...

    def mixes_rows(self, plan: Plan) -> bool:
        """Whether tokens of a block attend to each other."""
        ...

    def estimate(self, source: Path, bundle: Bundle, plan: Plan) -> Estimate:
        """Predict sizes without building; raises `EdgeLLMError` for unsupported bundles."""
        ...

    def compile(
        self, source: Path, bundle: Bundle, plan: Plan, folder: Path, report: Report
    ) -> Compiled:
        """Build the engine's graphs of all roles into `folder`; time them if they run here."""
        ...


def find(name: str) -> Backend:
    """The backend of a library or package; see `runners.resolve`, which raises."""
    return cast(Backend, importlib.import_module(f"edgellm.build.{runners.resolve(name)}"))


def choose(library: str, device: str) -> str:
    """The name of a library's backend for a device, "" for the library's default.

    Raises:
        EdgeLLMError: unknown, unavailable on this machine, or not for the device.
    """
    name = runners.resolve(library, device)
    backend = find(name)
    if device and device != backend.DEVICE:
        raise EdgeLLMError(
            f"--device {device} is not for {backend.LABEL}",
            hint="it goes with --backend onnxruntime",
        )
    return name


def implied_library(library: str, device: str, target_sm: str) -> str:
    """The library; TensorRT in place of "auto" with `--gpu`, as only its RTX compiles ahead."""
    return "tensorrt" if target_sm and library == "auto" and device != "cpu" else library


def options_of(name: str, flags: Mapping[str, Any]) -> Options:
    """A backend's options from the flags of all backends; None: not given.

    Raises:
        EdgeLLMError: a flag belongs to another backend.
    """
    fields = _fields(name)
    given = {flag: value for flag, value in flags.items() if value is not None}
    for flag in given:
        if flag not in fields:
            raise _refusal(flag, name)
    return find(name).Options(**{fields[flag]: value for flag, value in given.items()})


def _refusal(flag: str, name: str) -> EdgeLLMError:
    """The error for a flag of other backends, with their names."""
    owners = [each for each in runners.names() if flag in _fields(each)]
    here = [each for each in owners if library_of(each) == library_of(name)]
    ways = [f"--device {find(each).DEVICE}" for each in here]
    ways += sorted({f"--backend {library_of(each)}" for each in owners if each not in here})
    what = find(name).DEVICE if here else find(name).LABEL
    hint = f"leave it out: it goes with {', or '.join(ways)}"
    return EdgeLLMError(f"{flag} is not for {what}", hint=hint)


def _fields(name: str) -> dict[str, str]:
    """Names of a backend's options by flag."""
    return {one.metadata[FLAG]: one.name for one in dataclasses.fields(find(name).Options)}
