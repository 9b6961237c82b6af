"""Scripts for the target: POSIX sh with coreutils, without edgellm.

`sh -s` reads each script from standard input, so that neither the login shell nor the length of a
command line matters. Lists are here-documents, which no file name can end.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping

from edgellm.core.manifest import FileRecord

_END = "EDGELLM_END_OF_LIST"
MANIFEST_MARK = "edgellm manifest"


def check(folder: str, files: Mapping[str, FileRecord]) -> str:
    """Print `exists NAME` for existing files, `NAME: OK` for those with the right hash."""
    sums = "".join(f"{record.sha256}  {name}\n" for name, record in files.items())
    names = _lines(files)
    return f"""
if cd -- {shlex.quote(folder)} 2>/dev/null; then
while IFS= read -r name; do [ -e "$name" ] && printf 'exists %s\\n' "$name"; done <<'{_END}'
{names}{_END}
LC_ALL=C sha256sum -c - 2>/dev/null <<'{_END}'
{sums}{_END}
fi
exit 0
"""


def tools(*wanted: str) -> str:
    """Print the commands of `wanted` that are missing."""
    return "".join(
        f"command -v {name} >/dev/null 2>&1 || printf '%s\\n' {name}\n" for name in wanted
    )


def prepare(folder: str, stage: str, manifests: Iterable[str]) -> str:
    """Create the stage; print the line of `df -Pk`, then existing manifests after marks.

    Fails if the stage cannot be written.
    """
    printed = "".join(
        f"printf '\\n{MANIFEST_MARK}\\n'; cat -- \"$folder/{name}\" 2>/dev/null\n"
        for name in manifests
    )
    return f"""
folder={shlex.quote(folder)}; stage={shlex.quote(stage)}
if [ -e "$folder" ] && [ ! -d "$folder" ]; then printf 'is a file\\n' >&2; exit 20; fi
mkdir -p -- "$stage" || exit 21
: > "$stage/.writable" || exit 21
rm -f -- "$stage/.writable"
df -Pk -- "$stage" | tail -n 1
{printed}exit 0
"""


def publish(folder: str, stage: str, names: Iterable[str], old: Iterable[str]) -> str:
    """Move files from the stage into the folder, remove `old` files and the stage.

    The script ignores signals, so that the folder never has files of two versions.
    """
    return f"""
set -e
trap '' HUP INT TERM
folder={shlex.quote(folder)}; stage={shlex.quote(stage)}
while IFS= read -r name; do
place="$folder/$name"
mkdir -p -- "${{place%/*}}"
mv -f -- "$stage/$name" "$place"
done <<'{_END}'
{_lines(names)}{_END}
while IFS= read -r name; do rm -f -- "$folder/$name"; done <<'{_END}'
{_lines(old)}{_END}
rm -rf -- "$stage"
"""


def forget(stage: str, names: Iterable[str]) -> str:
    """Remove files from the stage."""
    return "".join(f"rm -f -- {shlex.quote(f'{stage}/{name}')}\n" for name in names)


def _lines(names: Iterable[str]) -> str:
    return "".join(f"{name}\n" for name in names)
