"""`edgellm-doctor`: checks what this machine can build and run, with remedies."""
