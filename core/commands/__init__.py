"""Entry points of the commands."""
