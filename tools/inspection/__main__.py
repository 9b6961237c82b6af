"""`python -m edgellm.tools.inspection`."""

from edgellm.tools.inspection.cli import main

main()
