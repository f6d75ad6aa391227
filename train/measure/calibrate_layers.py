"""Searches for the sublayers that a target skips while it drafts for itself.

Draft & Verify (2309.08168, section 3.2) searches by Bayesian optimisation for the set with the most
tokens per second. Here tokens per second are predicted, from acceptance on answers of the target
and from measured costs. A trial is then a few passes over these answers, without a decode.

Shapes: B rows, D depths, n tokens fed per row, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decode.base.device import to_device
from decode.base.errors import UserError
from decode.costs import Costs
from decode.draft import Contexts
from decode.drafters import DRAFTERS
from decode.drafters.skip import SelfDrafter
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder
from decode.model.cache.cached_model import CachedLM
from decode.model.forward.sublayers import Sublayers
from decode.model.loading import Target
from decode.time_costs import measure_costs

OnProgress = Callable[[int], None]  # called with the number of sets tried so far
# How many of the sublayers that stay are tried in the place of one that is skipped.
SWAPS = 3


@dataclass(frozen=True)
class LayerCosts:
    """Costs of drafting, in plain steps.

    complete: the cost of a draft step through all layers. attention, mlp: how much less it costs
    for each attention and each MLP that is skipped. verify: the costs of passes by width.
    """

    complete: float
    attention: float
    mlp: float
    verify: Costs

    def draft(self, skipped: Sublayers) -> float:
        """c without these sublayers. They are assumed to cost the same in all layers."""
        saved = self.attention * len(skipped.attention) + self.mlp * len(skipped.mlp)
        return max(self.complete - saved, 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Converts to JSON values."""
        return {
            "draft_step": self.complete,
            "saved_by_attention": self.attention,
            "saved_by_mlp": self.mlp,
            **self.verify.to_dict(),
        }


@dataclass(frozen=True)
class LayerTrial:
    """A set of sublayers with its figures.

    acceptance: float64 [D], by depth: the share of draft tokens that are accepted there if all
    before them were. c: the cost of a draft step, in plain steps. gamma, speed: the chain length
    with the most tokens per second, and how many times plain decoding that is.
    """

    skipped: Sublayers
    acceptance: np.ndarray
    c: float
    gamma: int
    speed: float

    @classmethod
    def of(cls, skipped: Sublayers, acceptance: np.ndarray, costs: LayerCosts) -> "LayerTrial":
        """Predicts speeds from acceptance and costs."""
        gammas = np.arange(1, len(acceptance) + 1)
        c = costs.draft(skipped)
        tokens = 1 + acceptance.cumprod().cumsum()
        speeds = tokens / (gammas * c + costs.verify.verify(gammas + 1))
        best = int(speeds.argmax())
        return cls(skipped, acceptance, c, best + 1, float(speeds[best]))

    def to_dict(self) -> dict[str, Any]:
        """Converts to JSON values."""
        return {
            **self.skipped.to_dict(),
            "acceptance": self.acceptance.tolist(),
            "c": self.c,
            "gamma": self.gamma,
            "speed": self.speed,
        }


class ReadAnswers:
    """Answers of the target, and its keys and values for prompts and answers.

    prompts, outputs: token ids. They are read once. A trial reads the answers again, in blocks of
    `depth` tokens from the last to the first. So each block reads keys and values of the complete
    target for all text before it, and its own inside of the block. This is what a draft of that
    depth reads.
    """

    def __init__(
        self,
        lm: CachedLM,
        prompts: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        *,
        depth: int,
        sampling: Sampling,
    ) -> None:
        self.lm, self.depth, self.sampling = lm, depth, sampling
        texts = [[*p, *o] for p, o in zip(prompts, outputs, strict=True)]
        self.blocks = -(-max(map(len, outputs)) // depth)
        room = self.blocks * depth
        longest = max(map(len, texts)) + room
        self.contexts = Contexts.of(texts, longest)
        self.begins = np.array([len(prompt) for prompt in prompts])
        lm.reset(len(texts), longest)
        reads = self.begins - 1  # the last token of a prompt is the first that a block feeds
        if reads.any():
            ids = self.contexts.tokens[:, : int(reads.max())]
            lm.read(to_device(ids, lm.device), np.zeros_like(reads), reads)
        # float32 [B, D] of each block: the probability that the target drew a token with.
        self.p = [self._probability(lm, block)[0] for block in range(self.blocks)]

    def acceptance(self, skipped: Sublayers) -> np.ndarray:
        """float64 [D], by depth: Σ min(p, q) over the vocabulary, as a mean over the answers.

        Σ min(p, q) is the mean of min(1, q(x)/p(x)) over tokens x that the target drew. So only the
        probabilities of the answers are needed. For greedy text it is the share of equal tokens.
        """
        view = self.lm.view(skipped)
        accepted, count = np.zeros(self.depth), np.zeros(self.depth)
        with self.lm.slots.restored(self.begins - 1, self.blocks * self.depth):
            for block in reversed(range(self.blocks)):
                q, inside = self._probability(view, block)
                share = (q / self.p[block]).nan_to_num(0.0).clamp(max=1.0).cpu().numpy()
                accepted += np.where(inside, share, 0.0).sum(0)
                count += inside.sum(0)
        return accepted / np.maximum(count, 1)

    def _probability(self, lm: CachedLM, block: int) -> tuple[Tensor, np.ndarray]:
        """float32 [B, D]: the probability of each token of a block of the answers; and which of
        them there are, bool [B, D]."""
        start = self.begins - 1 + block * self.depth
        columns = start[:, None] + np.arange(self.depth + 1)
        columns = np.minimum(columns, self.contexts.tokens.shape[1] - 1)
        inside = columns[:, 1:] < self.contexts.lengths[:, None]
        tokens = to_device(np.take_along_axis(self.contexts.tokens, columns, axis=1), lm.device)
        logits = lm.forward(tokens[:, :-1], start)
        after = tokens[:, 1:, None]
        if self.sampling.greedy:
            return (logits.argmax(-1, keepdim=True) == after)[..., 0].float(), inside
        return self.sampling.probs(logits).gather(-1, after)[..., 0], inside


@dataclass(frozen=True)
class LayerCalibration:
    """The chosen set, all sets that were tried, and the costs behind the choice."""

    chosen: LayerTrial
    trials: list[LayerTrial]
    costs: LayerCosts
    layers: int
    prompts: int
    temperature: float

    @property
    def verdict(self) -> str:
        best, skipped = self.chosen, self.chosen.skipped
        text = (
            f"skips {len(skipped.attention)} of {self.layers} attentions and {len(skipped.mlp)} of "
            f"{self.layers} MLPs: a draft step costs {best.c:.2f} plain steps, and "
            f"{best.acceptance[0]:.2f} of the first draft tokens are accepted; with γ "
            f"{best.gamma}, {best.speed:.2f} times plain decoding is predicted"
        )
        if best.speed <= 1:
            text += ": drafting does not pay on this machine"
        return text + self.costs.verify.doubt()

    def to_dict(self) -> dict[str, Any]:
        """Converts to JSON values."""
        return {
            **self.chosen.to_dict(),
            "layers": self.layers,
            "prompts": self.prompts,
            "temperature": self.temperature,
            "costs": self.costs.to_dict(),
            "trials": [trial.to_dict() for trial in self.trials],
        }


def measure_layer_costs(target: Target, prompt: Sequence[int], depth: int) -> LayerCosts:
    """Measures the costs of drafts through all layers, without half of the attentions, and without
    half of the MLPs. Raises UserError as `measure_costs` does."""
    layers = CachedLM(target.model).layers
    half = frozenset(range(1, layers, 2))
    if not half:
        raise UserError("the target has one layer, so none can be skipped")
    sets = Sublayers(), Sublayers(attention=half), Sublayers(mlp=half)
    complete, attention, mlp = (
        measure_costs(
            Decoder(target.model, SelfDrafter(skipped), gamma=depth),
            [prompt],
            max_depth=depth,
            max_width=depth + 1,
        )
        for skipped in sets
    )
    return LayerCosts(
        complete.c(depth),
        max(complete.c(depth) - attention.c(depth), 0.0) / len(half),
        max(complete.c(depth) - mlp.c(depth), 0.0) / len(half),
        complete,
    )


@torch.inference_mode()
def calibrate_layers(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    depth: int = 8,
    max_trials: int = 300,
    sampling: Sampling | None = None,
    max_new_tokens: int = 64,
    seed: int = 0,
    costs: LayerCosts | None = None,
    progress: OnProgress = lambda tried: None,
) -> LayerCalibration:
    """Searches for the set with the highest predicted speed, on prompts (token ids) of the dev
    split. The target answers them first.

    Every sublayer is tried alone, which ranks them. Then each one is added in this order, where
    that raises the speed. Then single sublayers are taken out or added, and skipped ones exchanged
    for others, until nothing raises the speed or `max_trials` sets were tried.

    depth: the depth of the longest chains. costs: None: they are measured. Raises UserError for no
    prompts, if the target emits nothing, and as `Decoder`, `measure_costs` and
    `decode.model.forward.sublayers.changed_forward` do.
    """
    if not prompts:
        raise UserError("there are no prompts to search layers on")
    sampling = sampling or Sampling()
    costs = costs or measure_layer_costs(target, min(prompts, key=len), depth)
    lm = CachedLM(target.model)
    plain = Decoder(lm, DRAFTERS["none"](), eos_token_ids=target.eos_token_ids, sampling=sampling)
    outputs = plain.decode(prompts, max_new_tokens, seed=seed, batch_size=16).outputs
    answers = ReadAnswers(lm, prompts, outputs, depth=depth, sampling=sampling)
    search = _Search(answers, costs, max_trials, progress)
    best = search.run()
    trials = list(search.tried.values())
    return LayerCalibration(best, trials, costs, lm.layers, len(prompts), sampling.temperature)


class _Search:
    def __init__(
        self, answers: ReadAnswers, costs: LayerCosts, max_trials: int, progress: OnProgress
    ) -> None:
        self.answers, self.costs = answers, costs
        self.max_trials, self.progress = max_trials, progress
        self.layers = answers.lm.layers
        self.tried: dict[Sublayers, LayerTrial] = {}

    def run(self) -> LayerTrial:
        singles = Sublayers.all(self.layers).singles()
        ranked = [trial for single in singles if (trial := self._try(single))]
        ranked.sort(key=lambda trial: -trial.speed)
        order = [trial.skipped for trial in ranked]
        best = ranked[0]
        for single in order[1:]:
            best = self._better(best, single)
        before = None
        while before is not best and len(self.tried) < self.max_trials:
            before = best
            for single in order:
                best = self._better(best, single)
            for worst in reversed([single for single in order if single <= best.skipped]):
                stays = [single for single in order if not single <= best.skipped]
                for single in stays[:SWAPS]:
                    if worst <= best.skipped:
                        best = self._better(best, worst ^ single)
        return best

    def _better(self, best: LayerTrial, change: Sublayers) -> LayerTrial:
        """The set with this change, if it is faster; else the set itself."""
        trial = self._try(best.skipped ^ change)
        return trial if trial is not None and trial.speed > best.speed else best

    def _try(self, skipped: Sublayers) -> LayerTrial | None:
        """None if the set is empty or complete, or if no trial is left."""
        if not 0 < len(skipped) < 2 * self.layers:
            return None
        if skipped not in self.tried and len(self.tried) < self.max_trials:
            acceptance = self.answers.acceptance(skipped)
            self.tried[skipped] = LayerTrial.of(skipped, acceptance, self.costs)
            self.progress(len(self.tried))
        return self.tried.get(skipped)
