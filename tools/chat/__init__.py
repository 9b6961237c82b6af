"""`edgellm-chat`: a conversation with an engine, in a terminal or through a pipe."""
