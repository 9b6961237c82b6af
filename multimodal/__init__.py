"""Images and visual encoders."""
