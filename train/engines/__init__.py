"""Inference engines beside a run: they are launched, asked, guarded and read."""
