"""From a name or a directory to a drafter, and back."""
