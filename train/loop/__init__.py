"""The training loop: steps, optimizer, parallel processes, checkpoints, resuming."""
