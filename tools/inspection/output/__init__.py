"""Output of `edgellm-inspect`: tables, JSON, pages."""
