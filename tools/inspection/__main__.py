"""`python -m edgellm.tools.inspection`."""

from edgellm.core.commands.launch import run

run("edgellm.tools.inspection.cli")
