"""What drafts, one file each, named as `--spec` says it.

A network has `DEFAULTS` (`TreeLimits`) and `open(order)`, which loads it; if it is the draft in an
engine's folder, `ROLE`, the main role of such engines (`edgellm.core.graph_roles`), and where
several share a role, `METHODS`, the methods of its drafts. What looks tokens up in text alone has
`remember()`, which gives what starts the lookup of a request.
"""
