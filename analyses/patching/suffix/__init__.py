"""The fast engine: a patched run at the cost of what it changes, from the base run it keeps."""
