"""Data: rows to examples (`read`), examples to masked tokens (`chat`), samples to `batches`."""
