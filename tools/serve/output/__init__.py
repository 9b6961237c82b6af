"""Model output in the protocols' terms: reasoning, tool calls, streams, usage."""
