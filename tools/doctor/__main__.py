"""`python -m edgellm.tools.doctor`."""

from edgellm.core.commands.launch import run

run("edgellm.tools.doctor.cli")
