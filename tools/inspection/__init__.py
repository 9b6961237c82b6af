"""`edgellm-inspect`: what checkpoints, bundles and engines hold and need, where they are from."""
