"""`edgellm-inspect`: contents, memory and origin of checkpoints, bundles and engines."""
