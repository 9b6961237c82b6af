"""Building blocks of decoders as ONNX nodes."""
