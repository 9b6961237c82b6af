"""`python -m edgellm.quantize`."""

from edgellm.core.commands.launch import run

run("edgellm.quantize.cli")
