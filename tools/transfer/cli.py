"""`edgellm-transfer`: a bundle to a device, only what differs, checked by hash on arrival."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgellm.command import SNAKE_CASE, App, run_command
from edgellm.contract import EdgeLLMError

if TYPE_CHECKING:
    from edgellm.tools.transfer.file_list import FileList
    from edgellm.tools.transfer.target import Target

app = App(SNAKE_CASE)


@app.command()
def transfer(
    bundle: Annotated[
        Path, typer.Argument(metavar="BUNDLE", help="A bundle or an engine, with its manifest.")
    ],
    to: Annotated[
        str,
        typer.Argument(
            metavar="user@host:DIR", help="The folder that becomes the bundle; or a local one."
        ),
    ],
    check_only: Annotated[
        bool, typer.Option("--check", help="Send nothing, check the hashes of what is there.")
    ] = False,
) -> None:
    """Bring a bundle to a device; run it again after an interrupt to go on.

    Files whose hash is right there already do not travel; of a file that differs, rsync sends the
    parts that differ. What arrived is checked by sha256sum on the device and then moved into place.
    """
    from edgellm.tools.transfer.deliver import check, deliver
    from edgellm.tools.transfer.file_list import load
    from edgellm.tools.transfer.target import connected, is_within, parse

    listed, parsed = load(bundle), parse(to)
    if is_within(bundle, parsed):
        raise EdgeLLMError(f"{to} is the bundle itself", hint="give another folder")
    start = time.perf_counter()
    with connected(parsed) as target:
        if check_only:
            _report(listed, target, check(listed, target))
            return
        delivery = deliver(listed, target)
    size = sum(listed.files[name].num_bytes for name in delivery.changed)
    typer.echo(
        f"{target}: {len(delivery.changed)} of {len(listed.files)} files new or changed "
        f"({size / 1e6:.1f} MB), {delivery.sent.travelled / 1e6:.1f} MB travelled; all hashes "
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
