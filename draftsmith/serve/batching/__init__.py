"""The texts of requests in one decode: they wait, get rows, and are answered."""
