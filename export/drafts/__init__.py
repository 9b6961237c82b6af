"""Draft networks, one file for each method.

A file exports `Model` (tokens and hidden states to the next hidden states, and its head) and
`Fuse`, if hidden taps are fused first; attributes have the checkpoint's parameter names.

Networks that are not EAGLE drafts are a `Kind`: their modules detect their tensors (`own_names`),
read their config and build their graph.
"""
