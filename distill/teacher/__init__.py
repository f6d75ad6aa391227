"""Teachers: the target's distributions or hidden states for a text, live or from a cache."""
