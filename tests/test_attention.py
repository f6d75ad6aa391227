"""Our attention is attention, and in a chain a token has the same bits in any company."""
