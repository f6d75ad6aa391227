"""Where the figures of a run go while it runs: its own file of curves, and trackers."""
