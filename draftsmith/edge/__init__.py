"""Drafting at the edge, verification in the cloud."""
