"""What all commands share: entry points, reuse and replacement of outputs."""
