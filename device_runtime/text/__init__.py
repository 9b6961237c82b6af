"""Texts and tokens: tokenizer, special-token words, reasoning tags, bytes of tokens."""
