"""Engine: sequences, steps, chat templates, images, LoRA, KV cache manager."""
