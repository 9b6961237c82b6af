"""`python -m edgellm.tools.bench`."""

from edgellm.core.commands.launch import run

run("edgellm.tools.bench.cli")
