"""Distillation of the target into a small language model: losses, teacher signals, students."""
