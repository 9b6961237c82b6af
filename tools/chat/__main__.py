"""`python -m edgellm.tools.chat`."""

from edgellm.core.commands.entry_points import run

run("edgellm.tools.chat.cli")
