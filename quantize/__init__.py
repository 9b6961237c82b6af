"""Float checkpoints to quantized ones, with nvidia-modelopt; the layout of the result."""
