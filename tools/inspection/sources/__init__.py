"""Readers of what `edgellm-inspect` shows: checkpoints, bundles, engines."""
