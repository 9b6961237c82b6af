"""Downloads of models from the Hugging Face hub, or from the server that HF_ENDPOINT names.

Files lie in the hub's own cache, which other programs share. An interrupted download goes on where
it stopped.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from edgellm.core.errors import EdgeLLMError, LimitError, UnsupportedModelError
from edgellm.core.resources import can_write, private_folder
from edgellm.tools.store.store import free

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
_PRECISION = re.compile(
    r"[-._]((?:UD-)?(?:I?Q\d\w*|B?F16|F32|MXFP4\w*))(?:-(\d{5})-of-\d{5})?\.gguf", re.IGNORECASE
)
_PREFERRED = ("Q4_K_M", "Q4_0", "Q4_K_S", "Q5_K_M", "Q8_0")  # of a repository's GGUF files
_MODULES = "modules.json"  # of sentence-transformers
_MODULE_FILE = re.compile(r"\d+_\w+/(config\.json|model\.safetensors|pytorch_model\.bin)")
_TEXTS = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_CACHE_VARIABLES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")
_NETWORK = ("httpx", "httpx2", "httpcore", "requests", "urllib3")  # packages whose errors these are


@dataclass(frozen=True, slots=True)
class Download:
    """A model's files."""

    path: Path  # a folder or a .gguf file
    identity: str


def is_id(text: str) -> bool:
    """Whether a text has the form of a hub id: owner/model or owner/model:precision."""
    return _ID.fullmatch(text) is not None


def download(reference: str) -> Download:
    """Fetch a checkpoint, or one GGUF file: "owner/model:Q4_K_M" names its precision.

    Raises:
        EdgeLLMError: no such model, no access, or no connection while the cache lacks it.
        LimitError: the disk is too small.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    repository, _, precision = reference.partition(":")
    if not sys.stderr.isatty():
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
    try:
        info = HfApi().model_info(repository, files_metadata=True)
        sizes = {each.rfilename: each.size or 0 for each in info.siblings or ()}
        names = choose(reference, sizes, precision)
        architecture = (info.gguf or {}).get("architecture", "")
        names += encoder_of(names[0], sizes, architecture)
        folder = _complete(info, names)
        if folder is None:
            cache = _cache()
            _announce(info, sizes, names, cache)
            found = snapshot_download(repository, allow_patterns=names, cache_dir=cache)
            folder = Path(found)
    except GatedRepoError:
        raise EdgeLLMError(
            f"{repository} is gated: its owner grants access on the hub",
            hint=f"ask for it at {_endpoint()}/{repository}, then log in: hf auth login, or "
            "set HF_TOKEN",
        ) from None
    except RepositoryNotFoundError:
        raise EdgeLLMError(
            f"the hub has no model {repository}, or only for others",
            hint="check the id; for a private model log in: hf auth login, or set HF_TOKEN",
        ) from None
    except HfHubHTTPError as error:
        raise EdgeLLMError(
            f"{_endpoint()} failed: {str(error).splitlines()[0]}", hint="try it again later"
        ) from None
    except EdgeLLMError:
        raise
    except Exception as error:  # each HTTP library has errors of its own
        if not _is_of_network(error):
            raise
        return _cached(reference, error)
    return _found(folder, repository, names)


def choose(reference: str, names: Collection[str], precision: str) -> list[str]:
    """The files of a repository that edgellm reads.

    Args:
        reference: the model, for messages.
        names: all files.
        precision: of a GGUF file; "": of safetensors if there are any, else a common one.

    Raises:
        UnsupportedModelError: none, or none of that precision.
    """
    top = [name for name in sorted(names) if "/" not in name]
    ggufs: dict[str, list[str]] = {}
    for name in names:
        if "mmproj" not in name.lower() and (match := _PRECISION.search(name)):
            ggufs.setdefault(match[1].upper(), []).append(name)
    weights = [name for name in top if name.endswith(".safetensors")]
    # Mistral's repositories have the weights a second time.
    weights = [name for name in weights if not name.startswith("consolidated")]
    weights = weights or [name for name in top if re.fullmatch(r"pytorch_model.*\.bin", name)]
    if weights and not precision:
        texts = [name for name in top if name.endswith(_TEXTS)]
        return [*weights, *texts, *_modules(names)]
    wanted = (precision.upper(),) if precision else (*_PREFERRED, *sorted(ggufs))
    for each in wanted:
        if each in ggufs:
            return sorted(ggufs[each])
    if precision and ggufs:
        raise UnsupportedModelError(
            f"{reference}: the repository has no GGUF file of that precision",
            hint=f"it has {', '.join(sorted(ggufs))}",
        )
    raise UnsupportedModelError(
        f"{reference}: the repository has no {'GGUF file' if precision else 'weights'}",
        hint="give a repository with *.safetensors or *.gguf",
    )


def _modules(names: Collection[str]) -> list[str]:
    """Files of the modules of a sentence-transformers repository; of two formats safetensors."""
    if _MODULES not in names:
        return []
    found = {name for name in names if _MODULE_FILE.fullmatch(name)}
    doubled = {
        name.replace("/model.safetensors", "/pytorch_model.bin")
        for name in found
        if name.endswith(".safetensors")
    }
    return sorted(found - doubled)


def encoder_of(model: str, names: Collection[str], architecture: str = "") -> list[str]:
    """The file of a GGUF model's visual encoder, if its folder has one: half precision first.

    Args:
        model: the chosen file.
        names: all files of the repository.
        architecture: llama.cpp's, by the hub; "": unknown.
    """
    place, _, title = model.rpartition("/")
    found = [
        name
        for name in sorted(names)
        if name.rpartition("/")[0] == place
        and name.endswith(".gguf")
        and "mmproj" in name.lower()
        and name != model
    ]
    if not title.endswith(".gguf") or not found:
        return []
    from edgellm.export.checkpoints.gguf.visual.projector import languages, precision_rank

    if architecture and architecture not in languages():
        return []  # of an unsupported encoder
    return [min(found, key=precision_rank)]


def _cache() -> Path:
    """The hub's cache, or one in a private folder if the user's home cannot be written."""
    from huggingface_hub.constants import HF_HUB_CACHE

    cache = Path(HF_HUB_CACHE)
    if can_write(cache) or any(os.environ.get(name) for name in _CACHE_VARIABLES):
        return cache
    return private_folder() / ".cache" / "huggingface" / "hub"


def _lacking(info: ModelInfo, names: list[str], cache: Path) -> list[str]:
    from huggingface_hub import try_to_load_from_cache

    def is_there(name: str) -> bool:
        found = try_to_load_from_cache(info.id, name, cache_dir=cache, revision=info.sha)
        return isinstance(found, str)

    return [name for name in names if not is_there(name)]


def _complete(info: ModelInfo, names: list[str]) -> Path | None:
    """The model in a cache that cannot be written, which snapshot_download would need."""
    from huggingface_hub.constants import HF_HUB_CACHE

    cache = Path(HF_HUB_CACHE)
    if can_write(cache) or info.sha is None or _lacking(info, names, cache):
        return None
    return _place(cache, info.id) / "snapshots" / info.sha


def _place(cache: Path, repository: str) -> Path:
    return cache / f"models--{repository.replace('/', '--')}"


def _announce(info: ModelInfo, sizes: dict[str, int], names: list[str], cache: Path) -> None:
    """Print what will be downloaded, if the cache lacks it; require room on the disk."""
    missing = _lacking(info, names, cache)
    total = sum(sizes[name] for name in missing)
    if not missing:
        return
    count = f"{len(missing)} file{'s' if len(missing) > 1 else ''}"
    typer.echo(f"downloading {info.id}: {count}, {total / 1e6:.1f} MB", err=True)
    room = free(cache)
    if total > room:
        raise LimitError(
            f"{info.id} takes {total / 1e9:.1f} GB, the disk of {cache} has {room / 1e9:.1f} GB",
            hint="free some space, or name a folder on another disk in HF_HOME",
        )


def _cached(reference: str, error: Exception) -> Download:
    """The model of the cache, for a machine without a connection."""
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import OfflineModeIsEnabled

    repository, _, precision = reference.partition(":")
    places = [_place(cache, repository) for cache in dict.fromkeys((Path(HF_HUB_CACHE), _cache()))]
    place = next((each for each in places if each.is_dir()), places[0])
    offline = isinstance(error, OfflineModeIsEnabled)
    why = "HF_HUB_OFFLINE is set" if offline else f"{_endpoint()} cannot be reached"
    try:
        folder = place / "snapshots" / (place / "refs" / "main").read_text("utf-8")
        cached = [each.relative_to(folder).as_posix() for each in folder.rglob("*")]
        names = choose(reference, cached, precision)
        names += encoder_of(names[0], cached)
    except (OSError, UnsupportedModelError):
        raise EdgeLLMError(
            f"{why}, and the hub's cache lacks {reference}",
            hint="connect this machine, or copy the model here and give its folder or .gguf file",
        ) from None
    return _found(folder, repository, names)


def _found(folder: Path, repository: str, names: list[str]) -> Download:
    revision = folder.name  # of a snapshot: its commit
    is_gguf = names[0].endswith(".gguf")
    main = ":".join(["", *(name for name in names if "mmproj" in name.lower())])
    main = f":{names[0]}{main}" if is_gguf else ""
    return Download(folder / names[0] if is_gguf else folder, f"{repository}@{revision}{main}")


def _is_of_network(error: Exception) -> bool:
    from huggingface_hub.errors import LocalEntryNotFoundError  # no connection, and not cached

    if isinstance(error, LocalEntryNotFoundError):
        return True
    packages = {each.__module__.partition(".")[0] for each in type(error).__mro__}
    return isinstance(error, ConnectionError | TimeoutError) or not packages.isdisjoint(_NETWORK)


def _endpoint() -> str:
    from huggingface_hub.constants import ENDPOINT

    return ENDPOINT
