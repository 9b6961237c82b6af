"""`python -m edgellm.tools.evaluate`."""

from edgellm.core.commands.entry_points import run

run("edgellm.tools.evaluate.cli")
