"""`python -m edgellm.scripts.synthetic_vlm`."""

from edgellm.scripts.synthetic_vlm.cli import main

main()
