"""`edgellm-transfer`: bundles to devices, only what differs, checked by hash on arrival."""
