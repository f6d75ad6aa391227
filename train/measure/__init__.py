"""Measurement: evaluation of drafters, costs of passes, and calibration from both."""
