"""`python -m edgellm.quantize`."""

from edgellm.core.commands.entry_points import run

run("edgellm.quantize.cli")
