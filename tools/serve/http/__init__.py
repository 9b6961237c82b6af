"""HTTP around the protocols: CORS, errors, the page, OpenAPI."""
