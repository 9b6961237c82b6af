"""OpenAI's protocols: chat, completions, responses, embeddings."""
