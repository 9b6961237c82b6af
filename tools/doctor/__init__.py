"""`edgellm-doctor`: what this machine can build and run, and what to do about the rest."""
