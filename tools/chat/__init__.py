"""`edgellm-chat`: chat with an engine in a terminal or through a pipe."""
