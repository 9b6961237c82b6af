"""SmolVLM and SmolVLM2 (arXiv 2504.05299): Idefics3's encoder."""

from __future__ import annotations

from edgellm.export.visual import idefics3
from edgellm.export.visual.idefics3 import Config, Model

__all__ = ["TINY", "Config", "Model"]

TINY = {**idefics3.TINY, "model_type": "smolvlm", "scale_factor": 4}
