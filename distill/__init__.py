"""Teaching a small language model to agree with the target: losses, teacher signals, students."""
