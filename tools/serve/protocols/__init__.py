"""Other interfaces to the same conversations: each is read as a `ChatRequest`, and answered."""
