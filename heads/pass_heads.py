"""PaSS (2311.13581): the target drafts for itself, from trained embeddings of look-ahead tokens.

The target reads the last token of the text and then k look-ahead tokens in one pass, and predicts a
token at each of them. Their k embeddings are all that is trained: k·H numbers. The next pass
verifies the draft. So each step has two passes of the target.

Shapes: B rows, T tokens of a text, M look-ahead tokens of a row, H hidden size, K tokens of a
draft, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel

from decode.draft import Contexts
from decode.drafters import DRAFTERS
from decode.drafters.skip import SelfDrafter
from decode.drafters.trained import ParallelGrowth
from decode.draw.sampling import Sampling
from decode.model.cache.cached_model import CachedLM, LayerView
from decode.model.cache.requirements import require_trees
from decode.model.cache_names import with_cache
from decode.model.forward.sublayers import Sublayers
from decode.model.hidden_states import FINAL
from decode.model.kinds.layer_kinds import require_no_states
from decode.model.loading import DTYPES, Target
from decode.shapes import Growth, Shape
from distill.masked_copies import MaskedCopies, copies_of_depths, require_full_attention, taken_mask
from distill.student_settings import kept_share
from heads.heads_directory import load_heads
from heads.heads_drafter import require_depth
from heads.heads_module import HEADS, HeadBatch, Heads, Prediction, shift_left
from heads.options import PassOptions


@HEADS.register("pass")
class PassHeads(Heads):
    """ "Head" d + 1 is look-ahead token d. Head 1 is the target itself, and has no weights.

    The look-ahead tokens of a draft see the text up to its last token, and each other in causal
    order. All have the same loss weight. Each is trained on a part of the text's drafts, as PARD's
    mask tokens are (`distill.masked_copies`). The target reads the text without gradients.
    Only the look-ahead tokens need them, through all layers of the frozen target.

    At first each embedding is the mean of the target's. The paper does not tell its initial values
    or which drafts of a text it trains on. Its loss is cross-entropy on the text. Here any loss can
    be used.

    lookahead: [k, H], as the target's layer of embeddings would return them.
    """

    @classmethod
    def for_target(cls, options: Any, target: Target) -> Any:
        require_no_states(target.model)
        require_full_attention(target.model, "train other heads")
        if target.has_weights:
            require_trees(target.model)  # training feeds masks and positions of the same kind
        return options

    def __init__(
        self, options: PassOptions, model: PreTrainedModel, vocabulary: Tensor | None = None
    ) -> None:
        super().__init__(options, options.tokens + 1, model, vocabulary)
        size = model.get_input_embeddings().weight.shape[1]
        self.lookahead = nn.Parameter(torch.empty(options.tokens, size))
        # One part, but through all layers of the target.
        layers = model.config.get_text_config().num_hidden_layers
        places = range(1, options.tokens + 1)
        kept = sum(kept_share(place, options.keep, options.keep_min) for place in places)
        self.batch_parts = 1
        self.tokens_per_part = layers * kept
        self.mask_pairs, self.masks = kept * (1 + kept), layers
        # A list hides the target from `parameters` and from engines.
        self._target: list[PreTrainedModel] = []

    @torch.no_grad()
    def init_weights(self, model: PreTrainedModel) -> None:
        super().init_weights(model)
        embedding = model.get_input_embeddings()
        ids = torch.arange(len(embedding.weight), device=embedding.weight.device)
        self.lookahead.copy_(embedding(ids).float().mean(0))

    def borrow(
        self,
        model: PreTrainedModel,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        """The target itself keeps its dtype and device."""
        super().borrow(model, dtype, device)
        self._target = [model]

    def loss_weights(self, uniform: float) -> dict[int, float]:
        return dict.fromkeys(range(2, self.depth + 1), 1.0)

    @property
    def trains_all(self) -> bool:
        return not self.training

    def predictions(self, batch: HeadBatch, depths: Sequence[int]) -> Iterator[Prediction]:
        options = self.options
        predicted = batch.loss_mask.clone()
        predicted[:, 1] = False  # `Prediction` has no position before the first token
        masks = copies_of_depths(
            predicted, depths, options.keep, options.keep_min, training=not self.trains_all
        )
        if not masks.exists.shape[1]:
            # No draft is so long. One token that nothing reads keeps the weights in the graph.
            nothing = torch.zeros_like(predicted[:, :1])
            masks = MaskedCopies(nothing.long() + 1, nothing.long(), nothing)
        states = self._states(batch.input_ids, masks)
        for depth in depths:
            positions = torch.zeros_like(predicted)
            if depth == 1:
                positions = shift_left(batch.loss_mask, 2)
                of_target = shift_left(batch.features[FINAL], 1)[positions]
                yield Prediction(1, positions, of_target.to(self.dtype))
                continue
            # In the order of the anchors, as `MaskedCopies` has them.
            row, column = (masks.exists & (masks.copies == depth - 1)).nonzero(as_tuple=True)
            positions[row, masks.anchors[row, column] - 1] = True
            yield Prediction(depth, positions, states[row, column])

    def _states(self, ids: Tensor, masks: MaskedCopies) -> Tensor:
        """[B, M, H]: the target's last hidden states at the look-ahead tokens after texts.

        ids: int64 [B, T]. Padding follows the texts, where no look-ahead token sees it.
        """
        assert self._target, "the target is not borrowed yet"
        model, length = self._target[0], ids.shape[1]
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model.base_model(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                use_cache=True,
                **with_cache(model.base_model, cache),
            )
        visible = masks.visible(torch.ones_like(ids))[:, :, length:]
        states: Tensor = model.base_model(
            inputs_embeds=self.lookahead.to(model.dtype)[masks.copies - 1],
            attention_mask=taken_mask(model, visible),
            position_ids=masks.positions(length)[:, length:],
            use_cache=True,
            **with_cache(model.base_model, cache),
        ).last_hidden_state
        return states.to(self.dtype)


class _Embedding(nn.Module):
    """The target's embeddings. Ids from V on are look-ahead tokens."""

    def __init__(self, embedding: nn.Module, vocab_size: int, lookahead: Tensor) -> None:
        super().__init__()
        self.embedding, self.vocab_size, self.lookahead = embedding, vocab_size, lookahead

    def forward(self, ids: Tensor) -> Tensor:
        places = ids - self.vocab_size
        embedded = self.embedding(ids.clamp(max=self.vocab_size - 1))
        return torch.where(
            (places >= 0)[..., None],
            self.lookahead[places.clamp(min=0)].to(embedded.dtype),
            embedded,
        )


@DRAFTERS.register("pass")
class PassDrafter(SelfDrafter):
    """Drafts in any shape, at most k + 1 deep, with one pass of the target.

    The pass reads the last token of the text and then K − 1 look-ahead tokens. Its first logits are
    the target's for the next token. Place i does not see the tokens that are drawn at the places
    before it. So its q is the same on every path. The slots of the pass are restored, and the
    verification reads the last token again.

    This is one of two passes per step, as in the paper's algorithm. Look-ahead tokens are not fed
    behind the nodes of a draft.

    Raises UserError for a shape deeper than k + 1.
    """

    trained = True

    def __init__(self, heads: PassHeads, vocab_size: int, shape: Shape | None = None) -> None:
        super().__init__(Sublayers(), shape, depth_limit=heads.depth)
        require_depth(self.shape, heads)
        self.heads = heads.eval().requires_grad_(False)
        self.vocab_size = vocab_size

    @classmethod
    def load(cls, path: Path, target: Target, *, dtype: str) -> Self:
        """Load a directory written by `heads.heads_directory.save_heads`."""
        heads: Any
        heads, shape = load_heads(path, target, DTYPES[dtype])
        return cls(heads, target.vocab_size, shape)

    def with_shape(self, shape: Shape) -> "PassDrafter":
        require_depth(shape, self.heads)
        other = super().with_shape(shape)
        assert isinstance(other, PassDrafter)
        return other

    def view_of(self, lm: CachedLM) -> LayerView:
        embedding = lm.model.get_input_embeddings()
        return lm.view(self.skipped, _Embedding(embedding, lm.vocab_size, self.heads.lookahead))

    def growth(
        self, view: LayerView, contexts: Contexts, sampling: Sampling, max_depth: int
    ) -> Growth:
        start = contexts.lengths - 1
        ids = pad(contexts.last_tokens(view.device), (0, max_depth - 1))
        ids[:, 1:] = view.vocab_size + torch.arange(max_depth - 1, device=view.device)
        logits, vocabulary = view.forward(ids, start), self.heads.vocabulary
        if vocabulary is not None:
            logits = logits[..., vocabulary]
        return ParallelGrowth(contexts, sampling, view.vocab_size, vocabulary, logits)
