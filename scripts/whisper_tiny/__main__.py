"""`python -m edgellm.scripts.whisper_tiny`."""

from edgellm.core.cli import run_command
from edgellm.scripts.whisper_tiny.cli import app

run_command(app)
