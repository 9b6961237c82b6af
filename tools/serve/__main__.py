"""`python -m edgellm.tools.serve`."""

from edgellm.tools.serve.cli import main

main()
