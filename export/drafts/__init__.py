"""Draft networks, one file for each method.

A file exports `Model` (tokens and hidden rows to the next hidden rows, and its head) and, when the
base's features are fused first, `Fuse`; attributes carry the checkpoint's own parameter names.

A network of a shape of its own, which is no EAGLE draft, is a `Kind`: its module says how its
tensors are recognised (`own_names`), reads its facts and gives its graph.
"""
