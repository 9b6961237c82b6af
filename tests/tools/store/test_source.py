"""Models as users name them."""

from __future__ import annotations

from edgellm.tools.store.model_source import read_source


def test_a_gguf_model_in_several_files_has_the_content_of_all(tmp_path):
    parts = [tmp_path / f"model-Q4_0-0000{index}-of-00002.gguf" for index in (1, 2)]
    for part in parts:
        part.write_bytes(part.name.encode())
    (tmp_path / "model-Q4_0-00001-of-00003.gguf").write_bytes(b"of another model")
    source = read_source(str(parts[0]))
    assert source.name == "model-Q4_0"
    identity, fingerprint = source.identity(), source.fingerprint()
    assert (source.identity(), source.fingerprint()) == (identity, fingerprint)
    parts[1].write_bytes(b"changed")
    assert source.identity() != identity
    assert source.fingerprint() != fingerprint


def test_words_that_are_neither_paths_nor_hub_ids_may_be_stored_names():
    assert read_source("SmolLM2") is None
    assert read_source("owner/model:Q4_K_M").reference == "owner/model:Q4_K_M"
