"""`python -m edgellm.tools.train_draft`."""

from edgellm.core.commands.entry_points import run

run("edgellm.tools.train_draft.cli")
