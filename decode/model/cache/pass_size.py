"""How many tokens a pass feeds, and how much padding."""

import numpy as np

# The most padding of a pass: in tokens of all rows together, or of each row if that is more. More
# passes cost about as much.
PADDING, ROW_PADDING = 64, 8

# How many tokens of a prompt a pass feeds, over all rows. More make a pass longer and its masks and
# activations larger, but not cheaper per token.
PASS_TOKENS = 4096

# The most numbers in the mask of a pass: tokens of all rows, times slots. In a long text, a pass
# feeds fewer tokens, but never fewer than SHORT_PASS_TOKENS for this reason.
MASK_SIZE = 1 << 26
SHORT_PASS_TOKENS = 512

# The same for scores of all heads that are in memory together.
SCORES = 1 << 27
SCORED_TOKENS = 32


def pads_little(counts: np.ndarray, width: int) -> bool:
    """Whether one pass may feed `width` tokens of each row, of which counts, int [B], are no
    padding. Asked only for what computes padding: transformers' own forward, and layers of
    heads."""
    return width * len(counts) - int(counts.sum()) <= max(PADDING, ROW_PADDING * len(counts))


def pass_limit(slots: int, heads: int, most: int = PASS_TOKENS) -> int:
    """The most tokens of a pass in texts of `slots` slots, over all rows. heads: see
    `decode.model.memory.scored_heads`."""
    limit = min(most, max(MASK_SIZE // max(slots, 1), SHORT_PASS_TOKENS))
    return min(limit, max(SCORES // max(heads * slots, 1), SCORED_TOKENS))
