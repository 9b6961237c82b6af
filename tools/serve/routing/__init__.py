"""Engines by name, and the routing of requests to them."""
