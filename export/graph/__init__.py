"""ONNX graphs of decoders, drafts and encoders, built node by node."""
