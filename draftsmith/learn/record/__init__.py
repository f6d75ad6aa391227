"""Records the answers of another inference engine, as text that drafters learn from."""
