"""`python -m edgellm.tools.chat`."""

from edgellm.core.commands.launch import run

run("edgellm.tools.chat.cli")
