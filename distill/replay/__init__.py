"""Online distillation: records of rejected tokens, and learning from them."""
