"""Random configs of every exportable model type against transformers.

Verdict: the logits and greedy tokens are those of transformers, speculation gives the tokens of
plain decoding, or the export stops. `tests/export/config/test_properties.py` draws the configs.
A share of them runs in each test run, with sizes that are odd on purpose.
"""

from __future__ import annotations

import functools
import importlib.util
import random
from pathlib import Path
from typing import Any

import numpy as np
from adversary.attack import Finding, require
from adversary.workshop import Workshop
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from model_configs import configs

from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.sampling.sampler import SamplingParams
from edgellm.device_runtime.speculate.options import SpecOptions
from edgellm.export import models

SHARE = 6
GREEDY = SamplingParams(temperature=0)
ODD = {
    "hidden_size": (36, 52, 100),
    "intermediate_size": (17, 39, 75),
    "head_dim": (6, 10, 14, 18),
    "vocab_size": (97, 131),
}


def attack(workshop: Workshop, number: int, rng: random.Random, folder: Path) -> str:
    kinds = models.supported()
    model_type = kinds[(number * 7 + rng.randrange(len(kinds))) % len(kinds)]
    if number % 2:
        return _random_config(model_type, rng, folder)
    return _odd_sizes(workshop, model_type, rng, folder)


@functools.cache
def _properties() -> Any:
    """The test of configs, whose folder is no package."""
    path = Path(__file__).parent.parent / "export" / "config" / "test_properties.py"
    spec = importlib.util.spec_from_file_location("config_properties", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _random_config(model_type: str, rng: random.Random, folder: Path) -> str:
    """Logits of a config that may be wrong."""
    from transformers import AutoConfig

    properties = _properties()
    outcomes: list[str] = []

    @seed(rng.randrange(2**32))
    @settings(
        max_examples=1,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        deadline=None,
        database=None,
        derandomize=False,
    )
    @given(configs(model_type, type(AutoConfig.for_model(model_type))))
    def run(config: dict[str, Any]) -> None:
        model = properties.reference(config)
        try:
            if model is None:
                properties.read(config)
                outcomes.append("no reference")
                return
            session = properties.exported(config, model, folder)
        except EdgeLLMError as error:
            outcomes.append(f"stopped: {error}")
            return
        try:
            properties.compare(session, model, properties.read(config)[0].max_position_embeddings)
        except AssertionError as error:
            raise Finding(f"{config}: {error}") from None
        outcomes.append("equal")

    try:
        run()
    except Unsatisfiable:
        return f"{model_type}: none"
    return f"{model_type}: {outcomes[-1]}"


def _odd_sizes(workshop: Workshop, model_type: str, rng: random.Random, folder: Path) -> str:
    """Greedy tokens of a whole engine, plainly and with lookups that draft."""
    config = {**models.find(model_type).TINY}
    for name, sizes in ODD.items():
        if isinstance(config.get(name), int) and rng.random() < 0.6:
            config[name] = rng.choice(sizes)
    said = f"{config}"
    prompt = [rng.randrange(9, 90) for _ in range(rng.randrange(1, 9))]
    made = _reference(folder / "checkpoint", config, prompt, rng.randrange(1000))
    if isinstance(made, str):
        return f"{model_type}: not a model: {made}"
    flags = ("--model_dir", folder / "checkpoint", "--output_dir", folder / "bundle")
    ended = workshop.commands.run(folder, "edgellm-export", "llm", *flags, "--dtype", "fp32")
    if ended.require_clear() != "done":
        return f"{model_type}: rejected: {ended.reason}"
    sizes = ("--maxInputLen", 16, "--maxKVCacheCapacity", 48, "--maxVerifyTreeSize", 8)
    flags = ("--onnxDir", folder / "bundle", "--engineDir", folder / "engine", *sizes)
    ended = workshop.commands.run(
        folder, "llm_build", *flags, "--quantize", "none", "--kvCache", "float"
    )
    if ended.require_clear() != "done":
        return f"{model_type}: not built: {ended.reason}"
    text = " ".join(f"w{token}" for token in prompt)
    plain = _greedy(folder / "engine", text, None)
    require(plain == made, f"{said}: tokens {plain}, transformers has {made}")
    drafted = _greedy(folder / "engine", text, SpecOptions(network=None, lookups=("ngram",)))
    require(drafted == plain, f"{said}: speculation gives {drafted}, not {plain}")
    return f"{model_type}: equal"


def _greedy(engine: Path, text: str, spec: SpecOptions | None) -> list[int]:
    with LLM(engine, spec=spec) as llm:
        answer = llm.generate(text, sampling=GREEDY, max_generate_length=16)
        for _ in answer:
            pass
        return list(answer.token_ids)


def _reference(
    folder: Path, config: dict[str, Any], prompt: list[int], number: int
) -> list[int] | str:
    """Tokens of transformers; the text of its error where it takes no such sizes."""
    import torch
    from conftest import make_checkpoint
    from transformers import AutoModelForCausalLM

    try:
        make_checkpoint(folder, seed=number, **config)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        ids = torch.tensor([prompt])
        with torch.no_grad():
            for _ in range(16):
                logits = model(ids).logits[0, -1].numpy()
                ids = torch.cat([ids, torch.tensor([[int(np.argmax(logits))]])], 1)
                if int(ids[0, -1]) == 2:
                    break
    except Exception as error:  # noqa: BLE001 - transformers refuses sizes with anything
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ids[0, len(prompt) :].tolist()
