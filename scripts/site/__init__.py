"""The pages of the docs site that are made of the code: flags, manifests, request files."""
