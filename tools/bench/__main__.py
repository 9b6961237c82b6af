"""`python -m edgellm.tools.bench`."""

from edgellm.core.commands.entry_points import run

run("edgellm.tools.bench.cli")
