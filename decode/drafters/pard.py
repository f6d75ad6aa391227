"""PARD (2504.18583): a small language model that drafts all tokens in one pass."""

from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from decode.base.device import to_device
from decode.base.errors import UserError
from decode.draft import Contexts
from decode.drafters import DRAFTERS
from decode.drafters.small_lm import SmallLMDrafter
from decode.drafters.trained import ParallelGrowth
from decode.draw.sampling import Sampling
from decode.model.cache.pass_size import pads_little
from decode.model.loading import Target
from decode.shapes import Growth, Shape


def mark_parallel(config: Any, mask_token: int) -> None:
    """Write the mask token into a model's config, with the names that the paper's code and engines
    read."""
    config.pard_token = mask_token
    config.spd_type = "pard"


def stored_mask_token(config: Any) -> int | None:
    """The mask token in a model's config. None: the model drafts one token after the other.

    Raises UserError if it is not an id that the model has an embedding for.
    """
    token: Any = getattr(config, "pard_token", None)
    if token is None:
        return None
    rows: int = config.get_text_config().vocab_size
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < rows:
        raise UserError(
            f"pard_token is {token!r} in the drafter's config; expected the id of a mask token, "
            f"from 0 to {rows - 1}"
        )
    return token


def unused_token(wanted: int | str | None, target: Target, rows: int) -> int:
    """The id of a mask token: one that no text contains.

    wanted: a token id, or the text of one of the tokenizer's special tokens. None: the first row
    that the tokenizer has no token for. rows: the number of the drafter's embeddings.

    Raises UserError for a token that a text can contain: an ordinary one, or a special one with a
    role in the tokenizer or in its chat template.
    """
    tokenizer, count = target.tokenizer, target.token_count
    free = sorted(unused_special_tokens(target).items())
    listed = ", ".join(f"{token} {text!r}" for token, text in free[:8])
    advice = f"unused special tokens of the tokenizer: {listed or 'none'}"
    if wanted is None:
        if count < rows:
            return count
        raise UserError(
            f"the tokenizer has a token for each of the drafter's {rows} embeddings, so the mask "
            f"token must be named; {advice}"
        )
    token = wanted
    if isinstance(token, str):
        token = tokenizer.get_vocab().get(wanted, -1)
        if token < 0:
            raise UserError(f"mask_token {wanted!r} is not a token of the tokenizer; {advice}")
    if not 0 <= token < rows:
        raise UserError(
            f"mask_token is {token}, but the drafter has {rows} embeddings; expected an id from 0 "
            f"to {rows - 1}; {advice}"
        )
    text = text_of_used(token, target)
    if text is not None:
        raise UserError(
            f"mask_token {token} is in use: it is the token {text!r}; expected an id that no text "
            "contains; "
            + (f"ids from {count} to {rows - 1} are free; " if count < rows else "")
            + advice
        )
    return token


def text_of_used(token: int, target: Target) -> str | None:
    """The text of a token that texts may contain; None for an id that no text contains."""
    if token >= target.token_count or token in unused_special_tokens(target):
        return None
    return str(target.tokenizer.convert_ids_to_tokens(token))


def free_token(target: Target) -> int:
    """An id of the target's embeddings that no text contains: the first row that the tokenizer has
    no token for, else its last special token without a role. Raises UserError if there is none."""
    if target.token_count < target.vocab_size:
        return target.token_count
    free = unused_special_tokens(target)
    if not free:
        raise UserError(
            f"the tokenizer of {target.name} has a token for each of its {target.vocab_size} "
            "embeddings and no unused special token, but a parallel drafter needs an unused one; "
            "add a row to the target's embeddings (transformers: resize_token_embeddings)"
        )
    return max(free)


def unused_special_tokens(target: Target) -> dict[int, str]:
    """Special tokens without a role, by id: the tokenizer and the target name them for nothing, and
    the chat template does not write them."""
    tokenizer = target.tokenizer
    used = {*target.eos_token_ids, *tokenizer.all_special_ids}
    template = str(tokenizer.chat_template or "")
    return {
        token: str(added.content)
        for token, added in tokenizer.added_tokens_decoder.items()
        if added.special and token not in used and str(added.content) not in template
    }


@DRAFTERS.register("pard")
class ParallelLMDrafter(SmallLMDrafter):
    """Draws each token from the model's distribution at its place, in any shape.

    One pass reads the tokens that the cache lacks and then K − 1 copies of the mask token at the
    next positions. It gives the logits of K places (section 3.1). Place k does not see the tokens
    drafted at the places before it. So its q is the same on every path. The keys and values of mask
    tokens stay after the text in the cache, and the next pass overwrites them.

    The mask token is `pard_token` of the model's config. K is the depth of the draft, and may be
    larger than in training. Raises UserError without a mask token, and as `SmallLMDrafter`.
    """

    trained = True  # said again, as `train.run.config` finds it in the file
    decoder_only = True
    feeds_chains = False

    def __init__(
        self,
        model: PreTrainedModel,
        vocabulary: Tensor | None = None,
        shape: Shape | None = None,
        *,
        vocab_size: int | None = None,
        tokens: int | None = None,
    ) -> None:
        super().__init__(model, vocabulary, shape, vocab_size=vocab_size, tokens=tokens)
        mask_token = stored_mask_token(model.config)
        if mask_token is None:
            raise UserError(
                f"the drafter {type(model).__name__} has no mask token; expected pard_token in its "
                "config, as a distill stage with `parallel` writes it"
            )
        if self.lm.states is not None or self.lm.sources is not None:
            what = "keeps a running state" if self.lm.sources is None else "has an encoder"
            raise UserError(
                f"the drafter {type(model).__name__} {what} and has a mask token; drafts in one "
                "pass are known only for decoder-only models with attention layers"
            )
        self.mask_token = mask_token

    def growth(self, contexts: Contexts, sampling: Sampling, depths: np.ndarray) -> Growth:
        logits = self._places(contexts, depths > 0, int(depths.max()))
        return ParallelGrowth(contexts, sampling, self.vocab_size, self.vocabulary, logits)

    def _places(self, contexts: Contexts, drafting: np.ndarray, count: int) -> Tensor:
        """[B, count, V']: the logits of the next tokens. drafting: bool [B], the rows that draft.
        count: K. Where transformers' own forward pads (`lm.pads`), much padding is no one pass."""
        ends, masks = contexts.lengths, count - 1
        counts = self.missing(ends, drafting)
        lacking = int(counts[drafting].max())
        fits = len(ends) * (lacking + masks) <= self.lm.pass_tokens
        pads = self.lm.pads and not pads_little(np.minimum(counts, lacking), lacking)
        if pads or not fits:
            self.feed(contexts, ends - 1, drafting)  # in several passes, if needed
        missing = self.take_missing(contexts, ends, drafting, masks)
        assert missing is not None  # the last committed token is never in the cache
        ids, start, counts = missing
        # A row with fewer tokens has its mask tokens directly after them.
        ids = np.pad(ids, ((0, 0), (0, masks)))
        ids = np.where(np.arange(ids.shape[1]) < counts[:, None], ids, self.mask_token)
        columns = np.maximum(counts - 1, 0)[:, None] + np.arange(count)
        fed = np.where(counts > 0, counts + masks, 0)
        device = self.lm.device
        logits = self.lm.forward(to_device(ids, device), start, columns=columns, counts=fed)
        return logits[..., : self.rows]


def small_lm_drafter(model: PreTrainedModel, target: Target) -> SmallLMDrafter:
    """The drafter of a plain model with the target's tokenizer. It drafts in parallel if the
    model's config has a mask token."""
    is_parallel = stored_mask_token(model.config) is not None
    kind = ParallelLMDrafter if is_parallel else SmallLMDrafter
    return kind.of_target(model, target)
