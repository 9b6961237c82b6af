"""`python -m edgellm.tools.chat`."""

from edgellm.tools.chat.cli import main

main()
