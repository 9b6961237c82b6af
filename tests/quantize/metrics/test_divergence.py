"""KL divergence, perplexity and agreement, against explicit sums."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch

from edgellm.quantize.metrics.divergence import GreedyOutput, Score, count_changes, read_quality


def test_kl_and_perplexity_of_each_kind_equal_the_definitions():
    chance = np.random.default_rng(0)
    floats, rounded = chance.standard_normal((2, 6, 5)).astype(np.float32)
    ids, kinds = np.array([0, 3, -1, 4, 1, 2]), np.array([0, 1, 0, 1, 1, 0])
    score = Score(("code", "prose", "none"))
    for part in (slice(0, 4), slice(4, 6)):
        values = [torch.from_numpy(each[part]) for each in (floats, rounded, ids)]
        score.add(*values, kinds[part])
    found = score.quality()
    assert [*found.kinds] == ["code", "prose"]
    shares = [np.exp(each) / np.exp(each).sum(-1, keepdims=True) for each in (floats, rounded)]
    for quality, rows in ((found, range(6)), (found.kinds["code"], (0, 2, 5))):
        known = [row for row in rows if ids[row] >= 0]
        losses = [-np.mean([np.log(share[row, ids[row]]) for row in known]) for share in shares]
        divergence = [
            (p * np.log(p / q)).sum() for p, q in ((s[row] for s in shares) for row in rows)
        ]
        best = [each.argmax(-1) for each in shares]
        assert quality.tokens == len(rows)
        assert [quality.perplexity_float, quality.perplexity_quantized] == pytest.approx(
            np.exp(losses).tolist(), rel=1e-5
        )
        assert quality.kl_divergence == pytest.approx(np.mean(divergence), rel=1e-5)
        assert quality.top1_agreement == np.mean([best[0][row] == best[1][row] for row in rows])
        assert quality.accuracy_quantized == np.mean([best[1][row] == ids[row] for row in rows])
    assert read_quality(json.loads(json.dumps(asdict(found)))) == found


def test_changed_outputs_and_kept_tokens_are_counted_by_kind():
    asked = [
        GreedyOutput("sums", (1, 2), (3, 4, 5)),
        GreedyOutput("sums", (1,), (6, 7)),
        GreedyOutput("code", (9, 9), (1, 2, 3, 4)),
    ]
    assert (asked[0].input_ids, asked[0].start) == ((1, 2, 3, 4), 1)
    found = count_changes(asked, [np.array(ids) for ids in ([3, 4, 5], [0, 7], [1, 2, 0, 4])])
    assert (found.answers, found.changed, found.tokens, found.kept) == (3, 2, 3.0, 5 / 3)
    assert (found.kinds["sums"].changed, found.kinds["code"].kept) == (1, 2.0)
