"""Readers of checkpoints, bundles and engines for `edgellm-inspect`."""
