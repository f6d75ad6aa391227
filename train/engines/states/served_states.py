"""The target's hidden states from servers, asked for shortly before their use and then dropped.

The states in memory are those of a few batches.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from decode.base.artifact import size
from decode.base.errors import UserError
from decode.model.hidden_states import FINAL, layer_list_name
from decode.model.loading import Target
from decode.model.pretrained import is_sharded
from distill.teacher.feature_sources import LiveFeatures, join_rows
from distill.teacher.read_ahead import READ_AHEAD
from train.data.batches import RankText
from train.data.chat_tokens import Sample

HEADER_BYTES = 4096  # of a safetensors file, at most
ID_BYTES = 8  # of a token id in it
NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f")


class ServedStates:
    """A `FeatureSource` of states that servers make.

    ask: begins to ask for a sample's states, [n, L, H] in the target's dtype; None: no server
    answers this sample, so the target runs it here, now and in later epochs. layers: the captured
    ones. timed(): a context around the time that the training waits.
    say: called with the messages in `lost`, on servers and samples that fail.
    """

    def __init__(
        self,
        ask: "Callable[[Sample], Future[Tensor | None]]",
        target: Target,
        layers: "EngineLayers",
        *,
        timed: Callable[[], AbstractContextManager[None]],
        say: Callable[[str], None],
        lost: deque[str],
    ) -> None:
        self._ask, self._target, self._layers = ask, target, layers
        self._timed, self._say, self._lost = timed, say, lost
        self._round = self._number = -1
        self._asked: dict[int, list[Future[Tensor | None]]] = {}  # by batch
        self._unanswered: set[str] = set()  # ids of samples

    def look_ahead(self, text: RankText, number: int) -> None:
        """Ask for the samples of batch `number` and of the next ones, if they were not asked."""
        if text.round != self._round:
            for futures in self._asked.values():
                for future in futures:
                    future.cancel()
            self._asked.clear()
        for batch in range(number, min(number + 1 + READ_AHEAD, len(text))):
            if batch not in self._asked:
                self._asked[batch] = [self._begin(sample) for sample in text.batch(batch)]
        self._round, self._number = text.round, number
        self._say_all()

    def _begin(self, sample: Sample) -> "Future[Tensor | None]":
        if sample.id not in self._unanswered:
            return self._ask(sample)
        known: Future[Tensor | None] = Future()
        known.set_result(None)
        return known

    def _say_all(self) -> None:
        while self._lost:
            self._say(self._lost.popleft())

    def features(
        self, input_ids: Tensor, attention_mask: Tensor, ids: Sequence[str]
    ) -> Mapping[int, Tensor]:
        """The states of the batch of the last `look_ahead`. They leave the window. Raises KeyError
        at a second call for one batch, and UserError as `StatesClient.states`, and if no server
        answers a sample of a sharded target."""
        device = input_ids.device
        with self._timed():
            futures = self._asked.pop(self._number)
            if not futures:  # a rank without rows still takes part in the step
                rows, length = input_ids.shape
                return self._layers.joined([self._layers.empty(length)] * rows, device)
            served = [future.result() for future in futures]
            self._say_all()
            missing = [row for row, states in enumerate(served) if states is None]
            lengths = attention_mask.sum(1).tolist()
            features = self._layers.joined(
                [
                    self._layers.empty(length) if states is None else states
                    for states, length in zip(served, lengths, strict=True)
                ],
                device,
            )
            for row in missing:
                tokens = input_ids[row : row + 1, : lengths[row]]
                for layer, x in self._run_here(tokens, ids[row]).items():
                    features[layer][row, : lengths[row]] = x[0]
            return features

    def _run_here(self, tokens: Tensor, sample: str) -> Mapping[int, Tensor]:
        """[1, n, H] by captured layer, of the target in this process."""
        if is_sharded(self._target.model):
            raise UserError(
                f"no server answers sample {sample}, and a sharded target cannot run it in one "
                "process; leave it out of the data. The newest checkpoint is kept"
            )
        self._unanswered.add(sample)
        live = LiveFeatures(self._target.model, self._layers.captured)
        return live.features(tokens, torch.ones_like(tokens), [sample])


class EngineLayers:
    """Captured layers of a target as vLLM has them. ids: vLLM's, in the order of a file."""

    def __init__(self, target: Target, captured: Sequence[int]) -> None:
        self.captured, self.ids = captured, engine_ids(target, captured)
        # Of each captured layer among those of a file.
        self._places = {layer: self.ids.index(engine_id(target, layer)) for layer in captured}
        self.hidden_size: int = target.model.config.get_text_config().hidden_size
        self.dtype, self._norm = target.dtype, last_norm(target) if FINAL in captured else None

    def empty(self, tokens: int) -> Tensor:
        """Zeros in place of a file's states, [n, L, H]."""
        return torch.zeros(tokens, len(self.ids), self.hidden_size, dtype=self.dtype)

    @torch.no_grad()
    def joined(self, states: Sequence[Tensor], device: torch.device) -> dict[int, Tensor]:
        """[B, T, H] by captured layer, from [n, L, H] of each sample. A server gives what the last
        norm reads, so that is applied here."""
        rows = [{layer: x[:, place] for layer, place in self._places.items()} for x in states]
        features = join_rows(rows, device)
        if self._norm is not None:
            features[FINAL] = self._norm(features[FINAL])
        return features


def file_bytes(token_bytes: int, tokens: int) -> int:
    """The size of a server's file. token_bytes: the bytes of the states of a token."""
    return HEADER_BYTES + tokens * (token_bytes + ID_BYTES)


def require_disk_room(largest: int, tokens: int, max_bytes: int, processes: int) -> None:
    """Raise UserError unless each of `processes` may have the largest file in its share of
    `max_bytes`. tokens: the tokens of the sample in that file."""
    if largest > max_bytes // processes:
        raise UserError(
            f"features.server.max_gib gives each of {processes} processes "
            f"{size(max_bytes / processes)} for files, but the hidden states of a sample of "
            f"{tokens} tokens take {size(largest)}; raise features.server.max_gib, or set a "
            "smaller max_length"
        )


def engine_id(target: Target, layer: int) -> int:
    """vLLM's id of a captured layer. Its id i is what layer i reads, so that of the last norm is
    the number of layers."""
    depth: int = target.model.config.get_text_config().num_hidden_layers
    return depth if layer == FINAL else layer + 1


def engine_ids(target: Target, layers: Sequence[int]) -> list[int]:
    """vLLM's ids of captured layers, in the order in which it writes their states: each once, from
    the first layer to the last."""
    return sorted({engine_id(target, layer) for layer in layers})


def last_norm(target: Target) -> nn.Module:
    """The norm after the target's last layer. Raises UserError if that is not clear."""
    layers = layer_list_name(target.model)
    parent = target.model.get_submodule((layers or "").rpartition(".")[0]) if layers else None
    norms = [x for name, x in parent.named_children() if name in NORMS] if parent else []
    if len(norms) != 1:
        raise UserError(
            f"vLLM's hidden states cannot be used with {type(target.model).__name__}: the norm "
            "after its last layer is not known; use features: live, and for answers "
            "no server.keep_states"
        )
    return norms[0]
