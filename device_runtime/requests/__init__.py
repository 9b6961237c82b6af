"""Request files: reading, running, proving, and the flags that go with them."""
