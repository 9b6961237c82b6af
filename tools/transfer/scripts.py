"""Scripts for the target: POSIX sh with coreutils, without edgellm.

`sh -s` reads each script from standard input, so that neither the login shell nor the length of a
command line matters. Lists are here-documents, which no file name can end.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping

from edgellm.core.manifest import DRAFT_FOLDER, MANIFEST_NAME, FileRecord

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


def keep(folder: str, previous: str, version: str, names: Iterable[str]) -> str:
    """Keep the files that publishing `version` replaces or removes, as hard links if possible.

    `previous` then has a folder `files`, a list `added` of names that are new, and `for`, the
    version. After an interrupt, the script resumes for the same version.
    """
    return f"""
set -e
folder={shlex.quote(folder)}; kept={shlex.quote(previous)}
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


def restore(folder: str, previous: str) -> str:
    """Restore the folder's files from before `keep`; fail with 22 if there are none."""
    return f"""
folder={shlex.quote(folder)}; kept={shlex.quote(previous)}
if [ ! -f "$kept/for" ]; then printf 'no earlier version is kept\n' >&2; exit 22; fi
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


def drop(previous: str) -> str:
    """Remove the kept files, which are older than the last version."""
    return f"rm -rf -- {shlex.quote(previous)}\n"


def versions(folder: str, previous: str) -> str:
    """Print `kept` if an earlier version exists, then path, hash and text of manifests."""
    return f"""
folder={shlex.quote(folder)}; kept={shlex.quote(previous)}
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
    """Run a user's command in the folder, without standard input."""
    return f"cd -- {shlex.quote(folder)} || exit 23\n(\n{command}\n) </dev/null\n"


def forget(stage: str, names: Iterable[str]) -> str:
    """Remove files from the stage."""
    return "".join(f"rm -f -- {shlex.quote(f'{stage}/{name}')}\n" for name in names)


def _lines(names: Iterable[str]) -> str:
    return "".join(f"{name}\n" for name in names)
