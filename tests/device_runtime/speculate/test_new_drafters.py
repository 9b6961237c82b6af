"""A drafter is one file: found by its name, opened and run."""

from __future__ import annotations

import shutil

import pytest
from added_files import added
from manifests import read_manifest, write_manifest

from edgellm.build.cli import app
from edgellm.core.errors import EdgeLLMError
from edgellm.core.graph_io import (
    HIDDEN_TAPS,
    TOP_K,
)
from edgellm.core.graph_roles import ROLES, Role, Rows
from edgellm.device_runtime import LLM, SamplingParams, SpecOptions, networks
from edgellm.device_runtime.request_files.spec_flags import SpecFlags
from edgellm.device_runtime.speculate import drafters

NETWORK = '''
"""Says that tokens are counted up."""
import numpy as np

from edgellm.device_runtime.speculate.policy.costs import Costs
from edgellm.device_runtime.speculate.drafter import TreeDrafter
from edgellm.device_runtime.speculate.drafter_loading import LoadedDrafter, check_tree_size
from edgellm.device_runtime.speculate.policy.tree_policy import TreeLimits

DEFAULTS = TreeLimits(top_k=1, steps=3, verify_size=4)


def open(order):
    check_tree_size(order)
    costs = Costs.of(order.pass_costs())
    return LoadedDrafter(costs=costs, start=lambda learned: Counting(learned, order.limits))


class Counting(TreeDrafter):
    def _expand(self, pool, levels):
        nodes = np.zeros(1, np.int64)
        for _ in range(levels):
            ids = (pool.token_ids[nodes] + 1)[:, None] % 90
            sure = np.full((1, 1), 0.9)
            nodes = pool.add(nodes, ids, np.log(sure), sure)
'''
LOOKUP = '''
"""Says that the newest token comes again."""
from edgellm.device_runtime.speculate.text_lookup import Continuation


def remember():
    return Echo


class Echo:
    maximum = 2

    def __init__(self):
        self.newest = 0

    def extend(self, token_ids):
        self.newest = [self.newest, *token_ids][-1]

    def continuations(self):
        return [Continuation([self.newest] * 2, [0.5] * 2)]

    def end(self, token_ids):
        pass
'''

# Medusa heads under another name: a role, a session over its graph, and a drafter.
SESSION = '''
"""All that follows, seen at once."""
from edgellm.device_runtime.networks import heads


def network(opened, spec, capacity):
    return heads.HeadsNetwork(opened["foresight"])


def costs(network, spec, max_rows=0, budget=None):
    (measured,) = heads.costs(network, spec, max_rows, budget).values()
    return {"glance": measured}
'''
OWN = '''
"""Drafts with what lies in the engine's folder."""
from edgellm.device_runtime.runners import find as find_runner
from edgellm.device_runtime.networks import find
from edgellm.device_runtime.speculate.policy.costs import Costs
from edgellm.device_runtime.speculate.drafters.medusa import MedusaDrafter, heads_limits
from edgellm.device_runtime.speculate.drafter_loading import LoadedDrafter, open_own
from edgellm.device_runtime.speculate.policy.tree_policy import TreeLimits

ROLE = "foresight"
DEFAULTS = TreeLimits()


def open(order):
    folder, manifest = open_own(order, "foresight")
    opened = find_runner(manifest.backend).open_engine(folder, manifest)
    network = find(ROLE).network(opened, manifest.spec, 0)
    costs = Costs.of(order.pass_costs(), None, manifest.cost_ms["glance"])
    limits = heads_limits(order, manifest.draft)

    def start(learned):
        return MedusaDrafter(network=network, learned=learned, limits=limits, costs=costs)

    return LoadedDrafter(costs=costs, start=start)
'''


@pytest.fixture
def drafters_more(tmp_path):
    """Two additional drafter files."""
    with added(drafters, tmp_path, counting=NETWORK, echo=LOOKUP):
        yield


@pytest.mark.usefixtures("drafters_more")
@pytest.mark.parametrize(("name", "size"), [("counting", 4), ("echo", 3)])
def test_a_file_is_a_drafter(tree_engine, name, size):
    options = SpecFlags(spec=name, tree="fixed", verify_size=size).read()
    assert options == SpecOptions(
        network="counting" if name == "counting" else None,
        tree="fixed",
        verify_size=size,
        lookups=("echo",) if name == "echo" else (),
    )
    llm = LLM(tree_engine, spec=options)
    for sampling in (SamplingParams(temperature=0), SamplingParams(temperature=0.3, seed=5)):
        plain, found = (
            llm.generate("w23", sampling=sampling, max_generate_length=20, speculative=drafts)
            for drafts in (False, True)
        )
        list(plain), list(found)
        assert len(found.token_ids) > 4
        assert found.token_ids == plain.token_ids
        assert max(counts.tree_size for counts in found.profile.rounds) == size


def test_a_network_of_a_new_shape_is_a_role_a_session_and_a_drafter(
    eagle_pairs, tmp_path, monkeypatch, capsys
):
    """Compiled, checked, measured and run, by `--spec` and by `--eagle`."""
    pair = eagle_pairs("medusa")
    bundle, engine = tmp_path / "bundle", tmp_path / "engine"
    shutil.copytree(pair.draft_bundle, bundle)
    shutil.copytree(pair.engine, engine)
    manifest = read_manifest(bundle)
    manifest["graphs"] = {"foresight": manifest["graphs"]["heads"]}
    write_manifest(bundle, manifest)
    facts = Role(rows=Rows.ONE, inputs=(HIDDEN_TAPS, TOP_K), measured={"glance": "a glance"})
    monkeypatch.setitem(ROLES, "foresight", facts)
    with (
        added(networks, tmp_path / "sessions", foresight=SESSION),
        added(drafters, tmp_path / "drafters", foresight=OWN),
    ):
        folders = ("--onnxDir", str(bundle), "--engineDir", str(engine))
        sizes = ("--maxInputLen", "64", "--maxKVCacheCapacity", "128", "--threads", "1")
        app([*folders, *sizes, "--eagleDraft", "--overwrite"], standalone_mode=False)
        built = capsys.readouterr().out
        assert "check: foresight passed: 3 tokens, relative error" in built
        assert "a glance takes, in ms by tokens: 1: " in built
        for asked in ({"spec": "foresight"}, {"eagle": True}):
            flags = SpecFlags(tree="fixed", verify_size=12, **asked)
            llm = LLM(engine, spec=flags.read())
            greedy = SamplingParams(temperature=0)
            plain, found = (
                llm.generate("w23", sampling=greedy, max_generate_length=12, speculative=drafts)
                for drafts in (False, True)
            )
            list(plain), list(found)
            assert found.token_ids == plain.token_ids
            assert max(counts.tree_size for counts in found.profile.rounds) == 12


def test_without_the_file_there_is_none():
    with pytest.raises(
        EdgeLLMError, match="--spec counting: give block, draft, eagle, gemma4_assistant, medusa"
    ):
        SpecFlags(spec="counting").read()
