"""Text and tokens: tokenizer, special tokens as text, reasoning marks, bytes of tokens."""
