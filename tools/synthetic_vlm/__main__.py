"""`python -m edgellm.tools.synthetic_vlm`."""

from edgellm.tools.synthetic_vlm.cli import main

main()
