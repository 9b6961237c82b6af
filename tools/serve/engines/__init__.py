"""Engines of a server: loading, eviction, worker threads, events."""
