"""Draft checkpoints: configs, tensors, vocabulary, masks."""
