"""What heads say in training, and a check that they draft it.

Shapes: B rows, T tokens, H hidden size, n tokens, V' draft vocabulary.
"""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decode.draft import Contexts
from decode.drafters import DRAFTERS
from decode.drafters.trained import ParallelGrowth
from decode.draw.sampling import Sampling
from decode.model.features import Features
from decode.model.hidden_states import FINAL, Recorder
from heads.heads_module import HeadBatch, Prediction
from tests.tiny import VOCAB, after

Logits = Callable[[Any, Prediction, Tensor], Tensor]


def features_of(model: Any, heads: Any, ids: Tensor) -> dict[int, Tensor]:
    """The hidden states that heads read, and the last ones, of a forward over ids, int64 [B, T]."""
    layers = tuple(dict.fromkeys((*heads.captured_layers, FINAL)))
    with torch.no_grad(), Recorder(model, layers).recording() as features:
        model(ids)
    return dict(features)


def logits_of(heads: Any, prediction: Prediction, ids: Tensor | None = None) -> Tensor:
    """[n, V']: of each predicted token of texts, int64 [B, T]."""
    logits: Tensor = heads.output.at(prediction.depth, prediction.states)
    if prediction.added is None:
        return logits
    rows, added = prediction.added
    return logits + rows @ added.T


def trained_logits(
    heads: Any, ids: Tensor, features: dict[int, Tensor], logits: Logits = logits_of
) -> dict[int, Tensor]:
    """By depth [T, V'] of one text: what training makes of each place, 0 where nothing is."""
    batch = HeadBatch(ids, torch.ones_like(ids, dtype=torch.bool), features)
    placed = {}
    with torch.no_grad():
        for prediction in heads.eval().predictions(batch, range(1, heads.depth + 1)):
            own = logits(heads, prediction, ids)
            placed[prediction.depth] = own.new_zeros(ids.shape[1], own.shape[1])
            placed[prediction.depth][prediction.positions[0]] = own
    return placed


def check_training_is_plain(
    heads: Any, model: Any, batch: dict[str, Tensor], plain: Callable[[Tensor, int], Tensor]
) -> int:
    """Each prediction of a training is that of a plain pass; returns how many there are. plain:
    [depth, V]: the logits of the tokens after a text, int64 [L]."""
    ids, mask = batch["input_ids"], batch["loss_mask"]
    count = 0
    seen = HeadBatch(ids, mask, features_of(model, heads, ids))
    for prediction in heads.predictions(seen, range(1, heads.depth + 1)):
        depth = prediction.depth
        for (row, place), state in zip(
            prediction.positions.nonzero().tolist(), prediction.states, strict=True
        ):
            assert mask[row, place + 2 : place + depth + 2].all()
            expected = plain(ids[row, : place + 2], depth)[-1]
            found = heads.output.at(depth, state)
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
            count += 1
    return count


def check_drafts_are_trained(
    heads: Any,
    model: Any,
    *,
    tree: bool = False,
    logits: Logits = logits_of,
) -> None:
    """Three rows at different places of a text, which grow by different numbers of tokens from
    round to round and leave. Drafts are forced to be the text; in trees they stand among others,
    and their siblings come first."""
    tokens = torch.arange(min(VOCAB, heads.rows)) if heads.vocabulary is None else heads.vocabulary
    generator = torch.Generator().manual_seed(1)
    ids = tokens[torch.randint(3, VOCAB, (3, 20), generator=generator) % len(tokens)]
    features = features_of(model, heads, ids)
    expected = [
        trained_logits(
            heads, ids[b : b + 1], {k: x[b : b + 1] for k, x in features.items()}, logits
        )
        for b in range(3)
    ]
    drafter: Any = DRAFTERS[heads.options.type](copy.deepcopy(heads), model.config.vocab_size)
    contexts = Contexts(np.pad(ids.numpy(), ((0, 0), (0, 20))), np.array([2, 5, 9]))
    rows_left = np.arange(3)

    def read(places: Tensor, counts: np.ndarray) -> None:
        """With nonsense past the counts."""
        beyond = torch.arange(places.shape[1]) >= torch.as_tensor(counts)[:, None]
        rows = torch.as_tensor(rows_left)[:, None]
        values = {
            k: x[rows, places].masked_fill(beyond[..., None], 99.0) for k, x in features.items()
        }
        drafter.read(Features(values, counts))

    with torch.inference_mode():
        drafter.start(contexts)
        read(torch.arange(8).expand(3, -1), contexts.lengths - 1)
        for grown in ([3, 1, 2], [2, 4, 1], [1, 3]):
            lengths = contexts.lengths
            growth = drafter.growth(contexts, Sampling(), heads.depth)
            found = growth.first()
            for depth in range(1, heads.depth + 1):
                for row, b in enumerate(rows_left):
                    _assert_same_q(found[row], expected[b][depth][lengths[row] - 2])
                if depth == heads.depth:
                    break
                following = np.take_along_axis(contexts.tokens, lengths[:, None] + depth - 1, 1)
                right = torch.searchsorted(tokens, torch.as_tensor(following))
                if not tree:
                    found = growth.extend(right)[:, 0]
                    continue
                # The wrong one stands first; both hang on the right one of the layer above.
                above = torch.full((len(rows_left), 2), 2 * depth - 3 if depth > 1 else -1)
                both = growth.extend(torch.cat([(right + 7) % len(tokens), right], 1), above)
                same = torch.allclose(both[:, 0], both[:, 1], atol=1e-4)
                # Only then no token depends on the one before it.
                assert same == (type(growth) is ParallelGrowth)
                found = both[:, 1]
            if len(grown) == 2:
                break
            read(torch.as_tensor(lengths - 1)[:, None] + torch.arange(max(grown)), np.array(grown))
            contexts.lengths = lengths + np.array(grown)
            drafter.observe(after(contexts))
            if grown == [2, 4, 1]:
                kept = np.array([2, 0])
                contexts = Contexts(contexts.tokens[kept], contexts.lengths[kept])
                rows_left = rows_left[kept]
                drafter.keep_rows(kept)


def _assert_same_q(found: Tensor, expected: Tensor) -> None:
    """Logits [V'], of which those far below the others are of tokens that are no candidates."""
    logs = (x.float().log_softmax(-1).clamp(min=-30) for x in (found, expected))
    torch.testing.assert_close(*logs, rtol=1e-3, atol=1e-3)
