"""Generated pages of the docs site: flags, errors, manifests, request files."""
