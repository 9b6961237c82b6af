"""Work spread over a Ray cluster, or over servers of one model with the OpenAI protocol."""
