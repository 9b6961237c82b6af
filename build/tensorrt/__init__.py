"""What a TensorRT takes, and how a graph is made to suit it."""
