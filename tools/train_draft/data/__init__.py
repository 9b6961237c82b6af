"""Training data: conversations, hidden states, images."""
