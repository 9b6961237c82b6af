"""`python -m edgellm.tools.doctor`."""

from edgellm.tools.doctor.cli import main

main()
