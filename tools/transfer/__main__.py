"""`python -m edgellm.tools.transfer`."""

from edgellm.tools.transfer.cli import main

main()
