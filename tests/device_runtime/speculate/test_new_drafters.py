"""A drafter is one file: found by its name, opened and run."""

from __future__ import annotations

import pytest
from added_files import added

from edgellm.contract import EdgeLLMError
from edgellm.device_runtime import LLM, SamplingParams, SpecOptions
from edgellm.device_runtime.requests.spec_flags import SpecFlags
from edgellm.device_runtime.speculate import drafters

NETWORK = '''
"""Says that tokens are counted up."""
import numpy as np

from edgellm.device_runtime.speculate.costs import Costs
from edgellm.device_runtime.speculate.drafter import TreeDrafter
from edgellm.device_runtime.speculate.opening import Opened, check_tree_size
from edgellm.device_runtime.speculate.policy import TreeLimits

DEFAULTS = TreeLimits(top_k=1, steps=3, verify_size=4)


def open(order):
    check_tree_size(order)
    return Opened(Costs.of(order.pass_costs()), lambda learned: Counting(learned, order.limits))


class Counting(TreeDrafter):
    def _grow(self, pool, levels):
        nodes = np.zeros(1, np.int64)
        for _ in range(levels):
            ids = (pool.token_ids[nodes] + 1)[:, None] % 90
            sure = np.full((1, 1), 0.9)
            nodes = pool.add(nodes, ids, np.log(sure), sure)
'''
LOOKUP = '''
"""Says that the newest token comes again."""
from edgellm.device_runtime.speculate.lookup import Continuation


def remember():
    return Echo


class Echo:
    most = 2

    def __init__(self):
        self.newest = 0

    def extend(self, token_ids):
        self.newest = [self.newest, *token_ids][-1]

    def continuations(self):
        return [Continuation([self.newest] * 2, [0.5] * 2)]

    def end(self):
        pass
'''


@pytest.fixture
def drafters_more(tmp_path):
    """Two files more among the drafters."""
    with added(drafters, tmp_path, counting=NETWORK, echo=LOOKUP):
        yield


@pytest.mark.usefixtures("drafters_more")
@pytest.mark.parametrize(("name", "size"), [("counting", 4), ("echo", 3)])
def test_a_file_is_a_drafter(tree_engine, name, size):
    options = SpecFlags(spec=name, tree="fixed", verify_size=size).read()
    assert options == SpecOptions(
        "counting" if name == "counting" else None,
        tree="fixed",
        verify_size=size,
        lookups=("echo",) if name == "echo" else (),
    )
    llm = LLM(tree_engine, spec=options)
    for sampling in (SamplingParams(temperature=0), SamplingParams(0.3, seed=5)):
        plain, found = (
            llm.generate("w23", sampling=sampling, max_generate_length=20, speculative=drafts)
            for drafts in (False, True)
        )
        list(plain), list(found)
        assert len(found.token_ids) > 4
        assert found.token_ids == plain.token_ids
        assert max(counts.tree_size for counts in found.profile.rounds) == size


def test_without_the_file_there_is_none():
    with pytest.raises(EdgeLLMError, match="--spec counting: give draft, eagle, medusa, ngram"):
        SpecFlags(spec="counting").read()
