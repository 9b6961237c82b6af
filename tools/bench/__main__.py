"""`python -m edgellm.tools.bench`."""

from edgellm.tools.bench.cli import main

main()
