"""`edgellm-transfer`: copies bundles to devices, differences only, verified by hash."""
