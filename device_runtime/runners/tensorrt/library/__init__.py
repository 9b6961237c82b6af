"""TensorRT itself: import, log, loaded engines, plugins."""
