"""`python -m edgellm.tools.evaluate`."""

from edgellm.core.commands.launch import run

run("edgellm.tools.evaluate.cli")
