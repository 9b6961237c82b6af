"""Encoded images and audio of requests: their cache, their rows in a prompt, audio engines."""
