"""The speculative decode loop: draft, verify, commit, roll back."""
