"""Captions of drawn scenes by the synthetic vision-language model in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoImageProcessor, AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from edgellm.build.verify.check import DEVIATIONS
from edgellm.scripts.proof_folder.steps.pictures import LIKELIEST
from edgellm.scripts.synthetic_vlm.scenes import draw

REQUEST = "Describe the image."
_SCENES = ((7, 0), (7, 1))  # seeds, which neither training nor other tests use
_MAX_TOKENS = 48
_LEAST_ERROR = 2.0**-7  # of a log-probability: the spacing of float16 at logits from 8 on
_DIGITS = 5


def expected_captions(model: Path, folder: Path) -> list[dict[str, Any]]:
    """Greedy captions with the log-probabilities of all tokens, and the limit of their error.

    Args:
        model: the checkpoint.
        folder: receives the pictures.
    """
    whole = Qwen2_5_VLForConditionalGeneration.from_pretrained(model, dtype=torch.float32).eval()
    inputs = [_inputs(model, folder / f"{at}.png", seed) for at, seed in enumerate(_SCENES)]
    tokens = [_greedy(whole, one) for one in inputs]
    exact = [_log_probs(whole, *pair) for pair in zip(inputs, tokens, strict=True)]
    whole.half()
    rounded = [_log_probs(whole, *pair) for pair in zip(inputs, tokens, strict=True)]
    return [
        {
            "picture": f"{at}.png",
            "request": REQUEST,
            "token_ids": ids,
            "logprobs": [[round(each, _DIGITS) for each in at] for at in wanted.tolist()],
            "allowed": DEVIATIONS * max(_error(other, wanted), _LEAST_ERROR),
        }
        for at, (ids, wanted, other) in enumerate(zip(tokens, exact, rounded, strict=True))
    ]


def _inputs(model: Path, picture: Path, seed: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """What the model gets for a scene, whose picture is written."""
    scene = draw(*seed)
    scene.image.save(picture)
    tokenizer, processor = (
        each.from_pretrained(model) for each in (AutoTokenizer, AutoImageProcessor)
    )
    content = [{"type": "image"}, {"type": "text", "text": REQUEST}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    pixels = processor(images=[scene.image], return_tensors="pt")
    count = int(pixels["image_grid_thw"].prod()) // processor.merge_size**2
    pad = "<|image_pad|>"
    ids = tokenizer(text.replace(pad, pad * count), return_tensors="pt").input_ids
    return {"input_ids": ids, **pixels}


def _greedy(model: Any, inputs: dict[str, torch.Tensor]) -> list[int]:
    ids = inputs["input_ids"]
    with torch.no_grad():
        found = model.generate(
            **inputs, **_types(model, ids), do_sample=False, max_new_tokens=_MAX_TOKENS
        )
    return found[0, ids.shape[1] :].tolist()


def _log_probs(model: Any, inputs: dict[str, torch.Tensor], tokens: list[int]) -> torch.Tensor:
    """Log-probabilities [T, V] of the tokens after the prompt."""
    prompt, others = inputs["input_ids"], {**inputs}
    del others["input_ids"]
    ids = torch.cat([prompt, torch.tensor([tokens])], dim=1)
    others["pixel_values"] = others["pixel_values"].to(model.dtype)
    with torch.no_grad():
        logits = model(input_ids=ids, **others, **_types(model, ids)).logits[0].float()
    return logits[prompt.shape[1] - 1 : -1].log_softmax(-1)


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest error of the likeliest tokens."""
    likely = wanted.topk(LIKELIEST).indices
    return float((found.gather(1, likely) - wanted.gather(1, likely)).abs().max())


def _types(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Which positions are of images."""
    return {"mm_token_type_ids": (ids == model.config.image_token_id).int()}
