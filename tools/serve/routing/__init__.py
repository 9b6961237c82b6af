"""Engines by name, and which engine answers a request."""
