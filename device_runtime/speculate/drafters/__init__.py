"""What drafts, one file each, named as `--spec` says it."""
