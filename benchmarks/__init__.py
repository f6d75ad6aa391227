"""The benchmarks of this project. Run one with `python -m benchmarks.NAME`."""
