"""Work on several servers of one model: edgellm's, or others with OpenAI's protocol."""
