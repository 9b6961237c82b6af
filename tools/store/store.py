"""The store: a folder of engines, each with a record of its model.

```
$EDGELLM_HOME/models/<key>/model.json   the record
                          /engine/      of llm_build, with its draft
                          /visual/      of visual_build, for models that see
                          /audio/       of audio_build, for models that hear
```

A key is the hash of the model's content and of how its engine is made. An entry appears at once,
complete, and an interrupted run leaves none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from edgellm.core import file_lock
from edgellm.core.artifact import defer_interrupt
from edgellm.core.errors import EdgeLLMError
from edgellm.core.resources import can_write, private_folder, user_folder

_RECORD, _USED = "model.json", "used"
_DATA = (".local", "share")  # of a user, in the home folder
_FORMAT, _VERSION, FORMAT = "format", "edgellm", 1  # keys and number of the record's format
_KEY_DIGITS = 16


def home() -> Path:
    """$EDGELLM_HOME, or edgellm's folder among the user's data."""
    given = os.environ.get("EDGELLM_HOME")
    data = Path(given) if given else user_folder("XDG_DATA_HOME", *_DATA) / "edgellm"
    return data.expanduser().absolute()


def _other_home(folder: Path) -> Path | None:
    """Where engines go if a home that no variable names cannot be written; None: it can."""
    is_named = os.environ.get("EDGELLM_HOME") or os.environ.get("XDG_DATA_HOME")
    if is_named or can_write(folder):
        return None
    with contextlib.suppress(EdgeLLMError):  # no temporary folder either
        return private_folder().joinpath(*_DATA, "edgellm")
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How an engine is made of a model; None: what suits the model and the machine."""

    quantize: str | None = None  # of float weights: none, int8 or int4
    context: int | None = None  # tokens of prompt and output together
    device: str | None = None  # cpu or cuda
    # none, auto, or a draft's folder, file or hub id. "", of a made engine: it goes with any, since
    # drafts of speech models are engines of their own
    draft: str = "auto"

    def fits(self, made: Recipe) -> bool:
        """Whether an engine made by `made`, whose values are chosen, is what this one asks for."""
        return (
            self.quantize in (None, made.quantize)
            and (self.context is None or self.context <= (made.context or 0))
            and self.device in (None, made.device)
            and made.draft in ("", self.draft)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What `model.json` says of an entry."""

    name: str
    reference: str  # what the user gave: a hub id or an absolute path
    identity: str  # of the model's content
    fingerprint: str  # of its files on disk, to see changes without reading them; "" for a hub's
    recipe: Recipe  # with the values chosen
    family: str
    num_parameters: int
    precision: str  # of the weights of linear layers
    draft: str  # for users
    num_bytes: int

    @property
    def key(self) -> str:
        """The name of its folder."""
        return key_of(self.identity, self.recipe)


def key_of(identity: str, recipe: Recipe) -> str:
    """The key of an engine made of a content by a recipe."""
    text = json.dumps([identity, dataclasses.asdict(recipe)])
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:_KEY_DIGITS]


@dataclass(frozen=True, slots=True)
class Entry:
    """A stored model."""

    folder: Path
    record: Record

    @property
    def engine(self) -> Path:
        """The folder of its engine."""
        return self.folder / "engine"

    @property
    def visual(self) -> Path | None:
        """The folder of its visual engine; None for a model of text."""
        folder = self.folder / "visual"
        return folder if folder.is_dir() else None

    @property
    def audio(self) -> Path | None:
        """The folder of its audio engine; None for a model that takes no audio."""
        folder = self.folder / "audio"
        return folder if folder.is_dir() else None

    @property
    def used_s(self) -> float:
        """When it was last used, in seconds since the epoch."""
        with contextlib.suppress(OSError):
            return (self.folder / _USED).stat().st_mtime
        return 0.0

    def touch(self) -> None:
        """Note that it is used now; a read-only store keeps no such note."""
        with contextlib.suppress(OSError):
            (self.folder / _USED).touch()


class Store:
    """The entries of a folder, which need not exist.

    If the user's home cannot be written, the entries there are read, and new ones go to a private
    folder among the temporary files.
    """

    def __init__(self, folder: Path | None = None) -> None:
        own = folder or home()
        other = _other_home(own) if folder is None else None
        self.models = (other or own) / "models"  # of new entries
        self.read_only = own / "models" if other else None  # of more entries

    def _records(self) -> Iterator[Path]:
        for models in filter(None, (self.models, self.read_only)):
            yield from models.glob(f"[!.]*/{_RECORD}")

    def entries(self) -> list[Entry]:
        """All entries, the most recently used first; damaged ones are left out."""
        found = [self._entry(path.parent) for path in self._records()]
        return sorted(filter(None, found), key=lambda entry: -entry.used_s)

    def named(self, name: str) -> list[Entry]:
        """Entries of a name, with or without the owner before it; [] if there is none.

        Raises:
            EdgeLLMError: several owners have a model of that name.
        """
        entries = self.entries()
        exact = [entry for entry in entries if entry.record.name == name]
        if exact:
            return exact
        short = [entry for entry in entries if entry.record.name.rpartition("/")[2] == name]
        names = sorted({entry.record.name for entry in short})
        if len(names) > 1:
            raise EdgeLLMError(f"{name} may be {' or '.join(names)}", hint="give the whole name")
        return short

    def similar(self, name: str) -> str:
        """The stored name that is most like a misspelled one; "" if none is."""
        names = sorted({entry.record.name for entry in self.entries()})
        short = {each.rpartition("/")[2].lower(): each for each in names}
        close = difflib.get_close_matches(name.rpartition("/")[2].lower(), short, n=1)
        return short[close[0]] if close else ""

    def add(self, work: Path, record: Record) -> Entry:
        """Move a finished folder of `temporary_folder` into the store; replaces an entry."""
        from importlib.metadata import version  # takes a hundredth of a second

        own = {_FORMAT: FORMAT, _VERSION: version("edgellm")}
        with (work / _RECORD).open("w", encoding="utf-8") as file:
            json.dump({**own, **dataclasses.asdict(record)}, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        (work / _USED).touch()
        target = self.models / record.key
        with defer_interrupt():
            if target.exists():
                self._delete(target)
            work.replace(target)
        return Entry(target, record)

    def remove(self, entry: Entry) -> None:
        """Delete an entry; programs that run it go on.

        Raises:
            EdgeLLMError: its folder is read-only.
        """
        if not can_write(entry.folder.parent):
            raise EdgeLLMError(
                f"{entry.folder} cannot be deleted: {entry.folder.parent} is read-only",
                hint="ask its owner, or make it writable",
            )
        with defer_interrupt():
            self._delete(entry.folder)

    def _delete(self, folder: Path) -> None:
        """Rename first, so that no half-deleted entry is ever found; a killed one is swept."""
        doomed = file_lock.begin(folder.with_name(f"removed-{folder.name}"))
        try:
            folder.replace(doomed.files / folder.name)
        finally:
            doomed.remove()

    @contextlib.contextmanager
    def preparing(self, reference: str, on_wait: Callable[[], None]) -> Iterator[None]:
        """Let one process at a time prepare a model; the others wait, and then find it.

        `on_wait`: called once, before a wait.
        """
        digest = hashlib.sha256(reference.encode("utf-8", "surrogateescape")).hexdigest()
        fault = ""
        try:
            self.models.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            fault = os.strerror(error.errno or 0)
        if fault or not can_write(self.models):
            raise EdgeLLMError(
                f"cannot write the model store {self.models}: {fault or 'it is read-only'}",
                hint="name a folder you may write in EDGELLM_HOME",
            )
        file_lock.sweep(self.models)
        with file_lock.wait(self.models / f".{digest[:_KEY_DIGITS]}.lock", on_wait):
            yield

    def notes(self) -> list[str]:
        """A line for each entry of another edgellm, which this one does not read."""
        found = []
        for path in sorted(self._records()):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                raw = json.loads(path.read_text("utf-8"))
                if raw.get(_FORMAT, FORMAT) != FORMAT:
                    found.append(
                        f"{raw.get('name', path.parent.name)}: edgellm {raw.get(_VERSION, '?')} "
                        f"stored it in format {raw[_FORMAT]}, this one reads {FORMAT}: "
                        f"{shlex.join(['edgellm', 'pull', str(raw.get('reference', 'MODEL'))])} "
                        f"stores it anew; {path.parent} may be deleted"
                    )
        return found

    def _entry(self, folder: Path) -> Entry | None:
        try:
            raw = json.loads((folder / _RECORD).read_text("utf-8"))
            if raw.pop(_FORMAT, FORMAT) != FORMAT:
                return None  # of another edgellm, see `notes`
            raw.pop(_VERSION, None)
            return Entry(folder, Record(**{**raw, "recipe": Recipe(**raw["recipe"])}))
        except (OSError, ValueError, KeyError, TypeError):
            return None


def size_of(folder: Path) -> int:
    """Bytes of all files of a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def free(folder: Path) -> int:
    """Free bytes on the disk of a folder that may not exist yet."""
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    return shutil.disk_usage(existing).free
