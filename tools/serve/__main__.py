"""`python -m edgellm.tools.serve`."""

from edgellm.core.commands.launch import run

run("edgellm.tools.serve.cli")
