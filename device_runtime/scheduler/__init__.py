"""Scheduling: which sequences share the next forward pass, and which thread runs it."""
