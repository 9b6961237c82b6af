"""The folder of stored models."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from edgellm.core.artifact import temporary_folder
from edgellm.core.errors import EdgeLLMError
from edgellm.tools.store import store as store_module
from edgellm.tools.store.store import FORMAT, Recipe, Record, Store, home

MADE = Recipe(quantize="none", context=4096, device="cpu", draft="auto")
RECORD = Record(
    name="owner/model",
    reference="owner/model",
    identity="owner/model@1",
    fingerprint="",
    recipe=MADE,
    family="llama",
    num_parameters=1,
    precision="float16",
    draft="n-grams",
    num_bytes=1,
)


def _add(store, **changes):
    record = replace(RECORD, **changes)
    store.models.mkdir(parents=True, exist_ok=True)
    with temporary_folder(store.models / "new") as work:
        (work / "engine").mkdir()
        return store.add(work, record)


@pytest.mark.parametrize(
    ("asked", "fits"),
    [
        (Recipe(), True),
        (Recipe(context=4096), True),
        (Recipe(context=4097), False),
        (Recipe(quantize="int4"), False),
        (Recipe(device="cuda"), False),
        (Recipe(draft="none"), False),
    ],
)
def test_recipes_that_an_engine_fits(asked, fits):
    assert asked.fits(MADE) == fits


def test_the_home_follows_xdg(monkeypatch):
    monkeypatch.delenv("EDGELLM_HOME", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert home() == Path("/data/edgellm")
    monkeypatch.delenv("XDG_DATA_HOME")
    assert home() == Path.home() / ".local/share/edgellm"
    monkeypatch.setenv("EDGELLM_HOME", "/own")
    assert home() == Path("/own")


@pytest.fixture
def read_only_home(tmp_path, monkeypatch):
    """A home with one stored model, which cannot be written any more."""
    for name in ("EDGELLM_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    own = tmp_path / "home"
    monkeypatch.setenv("HOME", str(own))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    _add(Store(own / ".local/share/edgellm"))
    whole = store_module.can_write
    monkeypatch.setattr(
        store_module, "can_write", lambda folder: own not in folder.parents and whole(folder)
    )
    return own


def test_a_read_only_home_is_read_and_a_private_folder_written(read_only_home, tmp_path):
    store = Store()
    assert store.models == tmp_path / f"edgellm-{os.getuid()}/.local/share/edgellm/models"
    (old,) = store.entries()
    assert old.folder.is_relative_to(read_only_home)
    with store.preparing("owner/second", on_wait=list):
        new = _add(store, name="owner/second", identity="2")
    assert {each.record.name for each in Store().entries()} == {"owner/model", "owner/second"}
    store.remove(new)
    with pytest.raises(EdgeLLMError, match="is read-only"):
        store.remove(old)
    assert store.entries() == [old]


@pytest.mark.parametrize("variable", ["EDGELLM_HOME", "XDG_DATA_HOME"])
def test_a_read_only_store_that_a_variable_names_is_an_error(read_only_home, monkeypatch, variable):
    """Engines lie where the user wants them, or nowhere."""
    monkeypatch.setenv(variable, str(read_only_home / ".local/share"))
    store = Store()
    assert store.read_only is None
    with (
        pytest.raises(EdgeLLMError, match=r"cannot write .*: it is read-only") as no,
        store.preparing("owner/second", on_wait=list),
    ):
        pass
    assert "EDGELLM_HOME" in no.value.hint


def test_an_entry_is_found_by_its_whole_and_its_short_name(tmp_path):
    store = Store(tmp_path)
    entry = _add(store)
    assert store.entries() == store.named("owner/model") == store.named("model") == [entry]
    assert store.named("other") == []
    assert store.similar("modle") == "owner/model"
    _add(store, name="another/model", identity="2")
    with pytest.raises(EdgeLLMError, match="may be another/model or owner/model"):
        store.named("model")


def test_the_entry_used_last_is_first(tmp_path):
    store = Store(tmp_path)
    first, second = _add(store), _add(store, identity="2")
    assert store.entries() == [second, first]
    first.touch()
    assert store.entries() == [first, second]


def test_an_entry_is_replaced_and_removed(tmp_path):
    store = Store(tmp_path)
    _add(store)
    entry = _add(store, num_bytes=2)
    assert [each.record.num_bytes for each in store.entries()] == [2]
    store.remove(entry)
    assert list(store.models.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{}", '{"recipe": {}}', "[1]", '{"name": 1, "recipe": 2}'])
def test_a_damaged_record_is_no_entry(tmp_path, text):
    store = Store(tmp_path)
    (_add(store).folder / "model.json").write_text(text)
    assert store.entries() == []


@pytest.mark.parametrize("change", [{}, {"a_new_field": 1, "recipe": {"new": 2}}])
def test_an_entry_of_another_format_is_named_with_the_command_that_stores_it_anew(tmp_path, change):
    store = Store(tmp_path)
    entry = _add(store)
    path = entry.folder / "model.json"
    raw = json.loads(path.read_text())
    assert (raw["format"], raw["edgellm"]) == (FORMAT, version("edgellm"))
    assert store.notes() == []
    path.write_text(json.dumps({**raw, "format": FORMAT + 1, "edgellm": "9.8", **change}))
    assert store.entries() == []
    (note,) = store.notes()
    assert note.startswith(f"{RECORD.name}: edgellm 9.8 stored it in format {FORMAT + 1}")
    assert f"edgellm pull {RECORD.reference} stores it anew" in note
    path.write_text(json.dumps({key: raw[key] for key in raw if key not in ("format", "edgellm")}))
    assert store.entries() == [entry]  # of the first versions


def test_a_store_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file")
    with (
        pytest.raises(EdgeLLMError, match="cannot write the model store"),
        store.preparing("x", lambda: None),
    ):
        pass
