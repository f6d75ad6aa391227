"""What several benchmarks measure with: contestants, runs, a relay."""
