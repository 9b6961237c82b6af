"""`python -m edgellm.tools.train_draft`."""

from edgellm.core.commands.launch import run

run("edgellm.tools.train_draft.cli")
