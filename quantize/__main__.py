"""`python -m edgellm.quantize`."""

from edgellm.quantize.cli import main

main()
