"""OpenAI's interfaces: chat, completions, responses, embeddings."""
