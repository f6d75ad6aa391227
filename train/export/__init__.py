"""Drafters in the layouts that inference engines read, and the proof that the engines use them."""
