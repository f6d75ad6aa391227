"""Drafters that look tokens up: in the text, in earlier texts, in a corpus."""
