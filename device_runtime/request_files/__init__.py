"""Request files: parsing, running, `--prove`, `--resume`, and command flags."""
