"""The target: loading, identity, the cache for decoding, and CPU kernels."""
