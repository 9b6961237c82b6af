"""Linear layers in lowering: their weights, groups and rounding."""
