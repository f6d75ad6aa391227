"""The layers of heads."""
