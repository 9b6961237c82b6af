"""Opens float drafts by their method."""

from __future__ import annotations

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.draft_checkpoints.block_config import BlockConfig
from edgellm.export.draft_checkpoints.config import DraftConfig
from edgellm.export.drafts.mtp import MtpConfig
from edgellm.export.pipeline.draft import DraftOptions, understand_draft
from edgellm.export.pipeline.open_checkpoint import open_checkpoint, open_draft
from edgellm.quantize.models.block_draft import BlockDraft
from edgellm.quantize.models.checks import check_floats
from edgellm.quantize.models.eagle_draft import Draft
from edgellm.quantize.models.language_model import LanguageModel
from edgellm.quantize.models.mtp_draft import MtpDraft


def open_float_draft(draft_dir: str, base_dir: str, ignored_keys: tuple[str, ...]) -> Draft:
    """Open and check a float draft and the float base that it was trained for.

    Raises:
        EdgeLLMError: one is invalid or quantized, or the draft belongs to another base.
    """
    checkpoint = open_draft(draft_dir)
    whole = open_checkpoint(base_dir, tokenizer=False)
    facts = understand_draft(checkpoint, whole, DraftOptions(ignore_config_keys=ignored_keys))
    if not isinstance(facts, DraftConfig | BlockConfig | MtpConfig):
        raise UnsupportedModelError(
            f"{checkpoint.label} is a {facts.method} draft, for which calibration is unsupported",
            hint="quantize its weights with llm_build --quantize int8 or int4",
        )
    check_floats(checkpoint)
    base = LanguageModel.open(base_dir, ignored_keys)
    if base.carried is not None:
        raise UnsupportedModelError(
            f"{checkpoint.label}: calibration of a draft of Gemma 3n or 4 is unsupported",
            hint="quantize its weights with llm_build --quantize int8 or int4",
        )
    if isinstance(facts, BlockConfig):
        return BlockDraft(checkpoint=checkpoint, facts=facts.draft, base=base, blocks=facts)
    if isinstance(facts, MtpConfig):
        return MtpDraft.of(checkpoint, facts, base)
    return Draft(checkpoint, facts, base)
