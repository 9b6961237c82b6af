"""`edgellm-bench`: how fast an engine reads prompts, decodes, and speculates, on this machine."""
