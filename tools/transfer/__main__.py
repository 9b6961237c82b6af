"""`python -m edgellm.tools.transfer`."""

from edgellm.core.commands.entry_points import run

run("edgellm.tools.transfer.cli")
