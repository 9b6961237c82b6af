"""Prompts to answers: the Python interface, the state of an answer, and the passes that grow it."""
