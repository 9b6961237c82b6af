"""`python -m edgellm.tools.evaluate`."""

from edgellm.tools.evaluate.cli import main

main()
