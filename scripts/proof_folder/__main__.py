"""`python -m edgellm.scripts.proof_folder`."""

from edgellm.scripts.proof_folder.cli import main

main()
