"""The speculative decode loop, and the drafters and rules that plug into it."""
