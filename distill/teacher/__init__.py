"""Teachers: what the target says of a text, live or from a cache."""
