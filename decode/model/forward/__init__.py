"""The forward of a model over its slots: the lean one, or transformers'."""
