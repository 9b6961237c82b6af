"""GGUF files of hybrids, written as llama.cpp's converters write them."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import make_checkpoint
from gguf_hybrids import HYBRIDS, write_hybrid

from edgellm.export.bundle import ExportOptions, export_llm
from edgellm.export.source import open_checkpoint
from edgellm.export.verify import run_portable

IDS = np.random.default_rng(3).integers(9, 96, 30)


def logits(source, output):
    manifest = export_llm(open_checkpoint(str(source)), output, ExportOptions("fp32"))
    return run_portable(output, manifest, IDS, 20)


@pytest.mark.parametrize("case", HYBRIDS)
def test_logits_are_those_of_the_checkpoint(tmp_path, case):
    arch, config = HYBRIDS[case]
    folder = make_checkpoint(tmp_path / "hf", **config)
    write_hybrid(tmp_path / "model.gguf", arch, folder)
    expected = logits(folder, tmp_path / "expected")
    found = logits(tmp_path / "model.gguf", tmp_path / "bundle")
    np.testing.assert_allclose(found, expected, atol=2e-4)
