"""Python interface: `LLM`, its requests and outputs."""
