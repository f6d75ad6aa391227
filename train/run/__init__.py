"""A run: its config, its stages one after the other, and the evaluations between them."""
