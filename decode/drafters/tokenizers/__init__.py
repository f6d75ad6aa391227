"""Small language models whose tokenizer is not the target's."""
