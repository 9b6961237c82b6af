"""Drafters, one file each, with the names that `--spec` takes.

A network has `DEFAULTS` (`TreeLimits`) and `open(order)`, which loads it. A draft in the engine's
folder also has `ROLE`, the main role of its engines (`edgellm.core.graph_roles`). If several
drafters share a role, `METHODS` lists the methods of each. A lookup has `remember()`, which
returns the factory of lookups for requests.
"""
