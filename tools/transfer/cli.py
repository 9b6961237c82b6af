"""`edgellm-transfer`: copies a bundle to a device, differences only, verified."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import typer

from edgellm.core.cli import NOTHING_HALF_WRITTEN, App, run_command
from edgellm.core.commands.progress import shown
from edgellm.core.errors import EdgeLLMError
from edgellm.tools.transfer.flags import Bundle, CheckOnly, To

if TYPE_CHECKING:
    from edgellm.tools.transfer.file_list import FileList
    from edgellm.tools.transfer.target import Target

app = App()
app.kept = NOTHING_HALF_WRITTEN


@app.command(
    common=("bundle", "to", "--check"),
    examples=(
        "edgellm-transfer bundle user@robot:models/bundle",
        "edgellm-transfer bundle user@robot:models/bundle --check",
    ),
)
def transfer(bundle: Bundle, to: To, check_only: CheckOnly = False) -> None:
    """Copy a bundle to a device; run it again to resume after an interrupt.

    Files with the right hash on the device are not sent; of other files, rsync sends the parts
    that differ. sha256sum verifies the files on the device before they are moved into place.
    """
    from edgellm.tools.transfer.file_list import load
    from edgellm.tools.transfer.push import check, deliver
    from edgellm.tools.transfer.target import connected, is_within, parse

    listed, parsed = load(bundle), parse(to)
    if is_within(bundle, parsed):
        raise EdgeLLMError(f"{to} is the bundle itself", hint="give another folder")
    start = time.perf_counter()
    with connected(parsed) as target:
        if check_only:
            _report(listed, target, check(listed, target))
            return
        app.kept = f"what arrived is kept in {target.stage} there"
        with shown() as report:
            delivery = deliver(listed, target, report)
    size = sum(listed.files[name].num_bytes for name in delivery.changed)
    typer.echo(
        f"{target}: {len(delivery.changed)} of {len(listed.files)} files new or changed "
        f"({size / 1e6:.1f} MB), {delivery.sent.sent_bytes / 1e6:.1f} MB sent; all hashes "
        f"right, {time.perf_counter() - start:.1f} s"
    )


def _report(listed: FileList, target: Target, wrong: tuple[str, ...]) -> None:
    if wrong:
        raise EdgeLLMError(
            f"{target}: {len(wrong)} of {len(listed.files)} files are missing or differ: "
            + ", ".join(wrong),
            hint="run it without --check to send them",
        )
    typer.echo(f"{target}: {len(listed.files)} files, all hashes right")


def main() -> None:
    """Entry point."""
    run_command(app)
