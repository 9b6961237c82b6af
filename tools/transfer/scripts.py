"""What runs on the target: POSIX sh with coreutils, nothing of edgellm.

Every script is given to `sh -s` on its standard input, so that neither the login shell nor the
length of a command line matters; lists are here-documents, which nothing in a name can end.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping

from edgellm.core.manifest import DRAFT_FOLDER, MANIFEST_NAME, FileRecord

_END = "EDGELLM_END_OF_LIST"
MANIFEST_MARK = "edgellm manifest"


def check(folder: str, files: Mapping[str, FileRecord]) -> str:
    """Print `there NAME` for files that are there, `NAME: OK` for those with the right hash."""
    sums = "".join(f"{record.sha256}  {name}\n" for name, record in files.items())
    names = _lines(files)
    return f"""
if cd -- {shlex.quote(folder)} 2>/dev/null; then
while IFS= read -r name; do [ -e "$name" ] && printf 'there %s\\n' "$name"; done <<'{_END}'
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
    """Make the stage; print the free kilobytes, and after marks the manifests that are there.

    Fails where nothing can be written.
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
    """Move files from the stage to their places, remove `old` ones, and then the stage.

    Signals do not stop it, so that a folder is never left with files of two versions.
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


def keep(folder: str, kept: str, version: str, names: Iterable[str]) -> str:
    """Keep what publishing `version` will replace or remove, as hard links where there are any.

    `kept` then has the folder `files`, a list `added` of names that were not there, and `for`, the
    version. Run again after an interrupt, it leaves what it has kept for the same version.
    """
    return f"""
set -e
folder={shlex.quote(folder)}; kept={shlex.quote(kept)}
if [ "$(cat -- "$kept/for" 2>/dev/null)" != {version} ]; then
rm -rf -- "$kept"; mkdir -p -- "$kept/files"; : > "$kept/added"
printf '%s\\n' {version} > "$kept/for"
fi
is_added() {{
while IFS= read -r known; do [ "$known" = "$1" ] && return 0; done < "$kept/added"
return 1
}}
while IFS= read -r name; do
copy="$kept/files/$name"
if [ -e "$copy" ] || is_added "$name"; then continue; fi
if [ -e "$folder/$name" ]; then
mkdir -p -- "${{copy%/*}}"
if ! ln -- "$folder/$name" "$copy" 2>/dev/null; then
cp -p -- "$folder/$name" "$kept/copy"
mv -f -- "$kept/copy" "$copy"
fi
else printf '%s\\n' "$name" >> "$kept/added"; fi
done <<'{_END}'
{_lines(names)}{_END}
"""


def put_back(folder: str, kept: str) -> str:
    """Make the folder what it was before `keep`; fail with 22 where nothing was kept."""
    return f"""
folder={shlex.quote(folder)}; kept={shlex.quote(kept)}
if [ ! -f "$kept/for" ]; then printf 'nothing earlier is kept\n' >&2; exit 22; fi
set -e
while IFS= read -r name; do
rm -f -- "$folder/$name"
case "$name" in */*) rmdir -- "$folder/${{name%/*}}" 2>/dev/null || :;; esac
done < "$kept/added"
find "$kept/files" -type f -print | while IFS= read -r copy; do
name=${{copy#"$kept/files/"}}; place="$folder/$name"
mkdir -p -- "${{place%/*}}"
[ "$copy" -ef "$place" ] || mv -f -- "$copy" "$place"
done
rm -rf -- "$kept"
rmdir -- "$folder" 2>/dev/null || :
"""


def drop(kept: str) -> str:
    """Remove what was kept: it is of an earlier version than the last."""
    return f"rm -rf -- {shlex.quote(kept)}\n"


def versions(folder: str, kept: str) -> str:
    """Print `kept` if an earlier version is, and after marks path, hash and text of manifests."""
    return f"""
folder={shlex.quote(folder)}; kept={shlex.quote(kept)}
if [ -f "$kept/for" ]; then printf 'kept\\n'; fi
for name in {MANIFEST_NAME} {DRAFT_FOLDER}/{MANIFEST_NAME}; do
if [ -f "$folder/$name" ]; then
printf '\\n{MANIFEST_MARK}\\n%s\\n' "$name"
sha256sum < "$folder/$name"
cat -- "$folder/$name"
fi
done
"""


def test(folder: str, command: str) -> str:
    """Run a command of the user in the folder; the rest of the script is not its input."""
    return f"cd -- {shlex.quote(folder)} || exit 23\n(\n{command}\n) </dev/null\n"


def forget(stage: str, names: Iterable[str]) -> str:
    """Remove files from the stage."""
    return "".join(f"rm -f -- {shlex.quote(f'{stage}/{name}')}\n" for name in names)


def _lines(names: Iterable[str]) -> str:
    return "".join(f"{name}\n" for name in names)
