"""Measurement: evaluation of drafters, costs of passes, and what is calibrated by them."""
