"""Heads on the target: small modules that read its hidden states and predict the next tokens.

Importing `heads.kinds` registers all kinds of heads and their drafters by name. This package alone
imports no torch, so that a config can be read without it.
"""
