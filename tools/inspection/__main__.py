"""`python -m edgellm.tools.inspection`."""

from edgellm.core.commands.entry_points import run

run("edgellm.tools.inspection.cli")
