"""Keys and values of the running rows: their slots, windows of them, and beginnings of texts."""
