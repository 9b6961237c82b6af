"""What all commands share: entry points, output folders that are reused or refused, progress."""
