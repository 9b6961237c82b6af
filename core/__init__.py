"""Modules that host and device share: errors, graph inputs and outputs, manifests, artifacts."""
