"""Online distillation: record rejected tokens and learn from them."""
