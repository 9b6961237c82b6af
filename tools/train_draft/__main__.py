"""`python -m edgellm.tools.train_draft`."""

from edgellm.tools.train_draft.cli import main

main()
