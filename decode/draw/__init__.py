"""From logits to tokens: distributions, random numbers, and log-probabilities."""
