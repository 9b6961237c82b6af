"""`edgellm-train-draft`: trains a draft for a base model."""
