"""KServe's protocol, version 2: tensors over HTTP and gRPC."""
