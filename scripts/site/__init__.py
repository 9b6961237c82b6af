"""Generated pages of the docs site: flags, manifests, request files."""
