"""`edgellm-serve`: engines over HTTP and gRPC, with OpenAI's and Triton's protocols."""
