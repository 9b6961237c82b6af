"""`edgellm-serve`: one engine behind the OpenAI and Triton interfaces."""
