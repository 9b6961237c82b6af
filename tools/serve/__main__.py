"""`python -m edgellm.tools.serve`."""

from edgellm.core.commands.entry_points import run

run("edgellm.tools.serve.cli")
