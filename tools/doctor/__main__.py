"""`python -m edgellm.tools.doctor`."""

from edgellm.core.commands.entry_points import run

run("edgellm.tools.doctor.cli")
