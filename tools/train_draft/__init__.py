"""edgellm-train-draft: an EAGLE3 draft for a given base model."""
