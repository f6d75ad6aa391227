"""Drafters made of several: in turn, in one tree, one for the other, one per domain."""
