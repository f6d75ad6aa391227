"""Makes drafters: runs and their stages, data, the training loop, engines beside them, reports."""
