"""`python -m edgellm.tools.transfer`."""

from edgellm.core.commands.launch import run

run("edgellm.tools.transfer.cli")
