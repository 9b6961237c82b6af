"""`--slotSavePath`: contexts outlast the server; files that do not fit are named and left alone."""

from __future__ import annotations

import pytest
from serve_process import ServerProcess, serving

from edgellm.core.errors import LimitError
from edgellm.device_runtime import LLM, SamplingParams, SpecOptions
from edgellm.device_runtime.engine.kv_snapshot import SnapshotFolder

GREEDY = SamplingParams(temperature=0)
PROMPT = " ".join(f"w{20 + at}" for at in range(30))
ENGINES = {"base": "12", "draft": "34"}
WAYS = {"plain": {}, "eagle": {"spec": SpecOptions(tree="fixed", top_k=2, verify_size=8)}}


def _answer(llm, prompt=PROMPT):
    answer = llm.generate(prompt, sampling=GREEDY, max_generate_length=8)
    for _ in answer:
        pass
    return answer.token_ids, sum(answer.profile.reused_tokens)


@pytest.mark.parametrize("way", WAYS)
def test_rows_are_read_again_by_another_process(roomy_engine, tmp_path, way):
    folder, llm = (
        SnapshotFolder(tmp_path, ENGINES),
        LLM(roomy_engine, context_reuse=True, **WAYS[way]),
    )
    folder.prepare()
    expected, reused = _answer(llm)
    assert reused == 0
    assert folder.save(llm.kv_cache_manager.all_prefixes()) == 1
    again = LLM(roomy_engine, context_reuse=True, **WAYS[way])
    found = folder.load(again.kv_cache_manager.num_networks)
    assert found.ignored == []
    for context in found.contexts:
        again.kv_cache_manager.pinned.add(context)
    assert _answer(again) == (expected, 29)
    _answer(again, "w20 w21 w80")  # another, beside it
    _answer(again, "w20 w21 w80 w81 w82")  # goes on with it
    again.kv_cache_manager.all_prefixes()
    assert folder.save(again.kv_cache_manager.all_prefixes()) == len(list(tmp_path.iterdir())) == 2


def test_what_does_not_fit_is_ignored_and_stays(roomy_engine, tmp_path):
    folder, llm = SnapshotFolder(tmp_path, ENGINES), LLM(roomy_engine, context_reuse=True)
    _answer(llm)
    folder.save(llm.kv_cache_manager.all_prefixes())
    (whole,) = tmp_path.iterdir()
    content = whole.read_bytes()
    for name, bad in (
        ("cut", content[:-7]), ("flipped", content[:-7] + b"x" + content[-6:]), ("empty", b""),
        ("foreign", b"{}"), ("headless", content.partition(b"\n")[0] + b"\n"),
    ):  # fmt: skip
        (tmp_path / f"{name}.context").write_bytes(bad)
    (tmp_path / "notes.txt").write_text("mine")
    SnapshotFolder(tmp_path, {"base": "other"}).save(llm.kv_cache_manager.all_prefixes())
    found = folder.load(1)
    assert len(found.contexts) == 1
    said = {line.split("/")[-1].split(".context is ignored: ")[-1] for line in found.ignored}
    assert said == {"it is damaged", "it is not a context", "it is of another engine"}
    assert len(found.ignored) == 6
    assert (
        found.contexts[0].parts[0].values.tobytes()
        == llm.kv_cache_manager.all_prefixes()[0].parts[0].values.tobytes()
    )
    assert any("other flags of speculation" in line for line in folder.load(2).ignored)
    assert folder.save([]) == 0  # forgotten: this engine's own alone are removed
    assert len(list(tmp_path.iterdir())) == 7
    assert not whole.exists()


def test_a_full_disk_loses_nothing(roomy_engine, tmp_path, monkeypatch):
    folder, llm = SnapshotFolder(tmp_path, ENGINES), LLM(roomy_engine, context_reuse=True)
    _answer(llm)
    folder.save(llm.kv_cache_manager.all_prefixes())
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    _answer(llm, "w50 w51")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    with pytest.raises(LimitError, match="No space left"):
        folder.save(llm.kv_cache_manager.all_prefixes())
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_server_starts_where_it_ended(roomy_engine, tmp_path):
    body, kept = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}, tmp_path / "contexts"
    with serving(roomy_engine, "--slotSavePath", kept) as server:
        assert server.json("/v1/completions", body)[0] == 200
    (kept / "copy.context").write_bytes(b"no")
    with serving(roomy_engine, "--slotSavePath", kept) as server:
        server.expects(f"warning: {kept / 'copy.context'} is ignored: it is not a context")
        _, answer = server.json("/v1/completions", body)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 29
    assert len(list(kept.iterdir())) == 2


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--noContextReuse",), "--slotSavePath saves contexts, which --noContextReuse"),
        ((), "--slotSavePath /dev/null/contexts: Not a directory"),
    ],
)
def test_an_unusable_slot_save_path_fails_at_start(roomy_engine, flags, reason):
    with pytest.raises(AssertionError, match=reason):
        ServerProcess(roomy_engine, "--slotSavePath", "/dev/null/contexts", *flags)
