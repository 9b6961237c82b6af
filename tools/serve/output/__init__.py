"""Model output as protocols show it: reasoning, tool calls, streams, usage."""
