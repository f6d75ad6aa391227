"""The target's hidden states for the next batches, made shortly before their use and then dropped.

Nothing is written to disk. The states in memory are those of a window of batches.
"""

from collections.abc import Mapping, Sequence

from accelerate import Accelerator
from torch import Tensor

from distill.teacher.feature_sources import LiveFeatures, join_rows, split_rows
from distill.teacher.read_ahead import READ_AHEAD
from train.data.batches import RankText, bucket_batches, collate, inputs
from train.data.chat_tokens import Sample
from train.engines.states.served_states import ServedStates
from train.loop.open_caches import Cache
from train.loop.training_task import LookAhead
from train.settings.training import LoopConfig

# With samples for several passes, each pass gets rows of similar length.
WINDOW_PASSES = 4


class LiveWindow:
    """A `FeatureSource` that runs the target over the samples of several batches together.

    The size of the target's passes then does not depend on the size of the training's batches. A
    small batch would use an accelerator badly, and on many ranks each has few rows of it.

    A window has the batches with the tokens of WINDOW_PASSES passes on each rank, at least one
    batch. It begins at a multiple of its number of batches, also after a restart in its middle. So
    each sample goes through the target in the same pass, and a restart changes no bit.

    source: runs the target. tokens_per_pass: rows times the longest row's length.
    """

    def __init__(
        self,
        source: LiveFeatures,
        loop: LoopConfig,
        accelerator: Accelerator,
        *,
        tokens_per_pass: int,
        pad_id: int,
    ) -> None:
        self._source, self._tokens, self._pad_id = source, tokens_per_pass, pad_id
        self._device = accelerator.device
        ranks = accelerator.num_processes
        self._batches = max(1, WINDOW_PASSES * tokens_per_pass * ranks // loop.tokens_per_batch)
        self._round = self._number = -1
        # By batch: [T, H] by layer of each sample.
        self._held: dict[int, list[dict[int, Tensor]]] = {}

    def look_ahead(self, text: RankText, number: int) -> None:
        """Fill the window, unless it has the batch `number` of this round."""
        if text.round != self._round or number not in self._held:
            self._held.clear()  # before the passes, which need memory too
            self._fill(text, number)
        self._round, self._number = text.round, number

    def features(
        self, input_ids: Tensor, attention_mask: Tensor, ids: Sequence[str]
    ) -> Mapping[int, Tensor]:
        """The states of the batch of the last `look_ahead`. They leave the window. Raises KeyError
        at a second call for one batch."""
        rows = self._held.pop(self._number)
        if not rows:
            return self._source.features(input_ids, attention_mask, ids)
        return join_rows(rows, input_ids.device)

    def _fill(self, text: RankText, number: int) -> None:
        first = number - number % self._batches
        window = range(first, min(first + self._batches, len(text)))
        samples: list[Sample] = []
        users: list[tuple[int, int]] = []  # of each sample: its batch, and its row there
        for batch in window:
            rows = text.batch(batch)
            users += [(batch, row) for row in range(len(rows))]
            samples += rows
            self._held[batch] = [{} for _ in rows]
        lengths = [len(sample.tokens) for sample in samples]
        for chosen in bucket_batches(lengths, tokens_per_batch=self._tokens, seed=0, epoch=0):
            # A batch before `number` is done, but its samples shape the passes.
            if all(users[i][0] < number for i in chosen):
                continue
            joined = collate([samples[i] for i in chosen], self._pad_id)
            tensors = inputs(joined, self._device)
            states = self._source.features(
                tensors["input_ids"], tensors["attention_mask"], joined["ids"]
            )
            split = split_rows(states, [lengths[i] for i in chosen], self._device)
            for i, state in zip(chosen, split, strict=True):
                batch, row = users[i]
                self._held[batch][row] = state
        for batch in range(first, number):
            del self._held[batch]


def look_ahead_of(
    source: LiveWindow | ServedStates | LiveFeatures | Cache | None,
) -> LookAhead | None:
    """What the trainer calls before each batch: a window is filled, servers are asked, and a cache
    is read ahead. None: nothing."""
    if source is None or isinstance(source, LiveFeatures):
        return None
    if isinstance(source, LiveWindow | ServedStates):
        return source.look_ahead
    cache = source

    def look_ahead(text: RankText, number: int) -> None:
        window = range(number, min(number + 1 + READ_AHEAD, len(text)))
        cache.expect([text.ids(i) for i in window])

    return look_ahead
