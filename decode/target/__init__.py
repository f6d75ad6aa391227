"""The target: loading, identity, the cache it decodes with, and its kernels on a CPU."""
