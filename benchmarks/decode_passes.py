"""The passes of a decoding loop, reported by the loop or observed from outside."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from transformers import PreTrainedModel


@dataclass
class Passes:
    """The target's passes over one job. If a loop runs the prompt in a separate pass, that pass and
    its token do not count.

    steps, emitted, drafted, reached, accepted: as in `decode.stats`, over all rows. The times are
    in seconds, one value per pass, or empty if they cannot be measured. draft_s: drafting (for
    other loops: the drafter's forwards). verify_s: the target's forward. overhead_s: the rest.
    """

    steps: int = 0
    emitted: int = 0
    drafted: int = 0
    reached: int = 0
    accepted: int = 0
    draft_s: list[float] = field(default_factory=list)
    verify_s: list[float] = field(default_factory=list)
    overhead_s: list[float] = field(default_factory=list)

    def __add__(self, other: "Passes") -> "Passes":
        return Passes(
            *(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True))
        )


class Watch:
    """Records the start, the end and the input sizes of a target's and a drafter's forwards.

    On a GPU the hooks would only see kernel launches, so it gives no times there.
    """

    def __init__(self, timed: bool) -> None:
        self._timed = timed
        self.fed: list[tuple[int, int]] = []  # the target's: (length of the past, input tokens)
        self.spans: list[list[float]] = []  # the target's
        self.drafts: list[list[float]] = []  # the drafter's

    def times(self) -> Passes:
        """Return draft_s, verify_s and overhead_s of `Passes`, without the prompt's pass."""
        drafts, verify, overhead = [], [], []
        for before, span in pairwise(self.spans) if self._timed else ():
            gap = [before[1], span[0]]
            inside = [end - begin for begin, end in self.drafts if gap[0] <= begin < gap[1]]
            drafts.append(sum(inside))
            verify.append(span[1] - span[0])
            overhead.append(gap[1] - gap[0] - drafts[-1])
        return Passes(draft_s=drafts, verify_s=verify, overhead_s=overhead)

    def passes(self, width: int, tokens: int, *, rows: int, drafts: bool) -> Passes:
        """Return the passes of `generate()`. width: tokens of each prompt. tokens: new tokens."""
        steps = len(self.fed)
        if not drafts:  # the prompt has a separate pass
            return self.times() + Passes(rows * (steps - 1), rows * (tokens - 1))
        last = [width - 1, *(past for past, _ in self.fed[1:]), width + tokens - 1]
        drafted = [self.fed[0][1] - width, *(fed - 1 for _, fed in self.fed[1:])]
        accepted = [b - a - 1 for a, b in pairwise(last)]
        reached = sum(min(d, a + 1) for d, a in zip(drafted, accepted, strict=True))
        counts = Passes(steps, tokens, sum(drafted), reached, sum(accepted))
        return self.times() + counts


@contextmanager
def watched(target: PreTrainedModel, drafter: PreTrainedModel | None) -> Iterator[Watch]:
    """Watch the two modules inside a `with` block."""
    watch = Watch(timed=target.device.type == "cpu")

    def begin(spans: list[list[float]]) -> Callable[..., None]:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if spans is watch.spans:
                past = kwargs.get("past_key_values")
                ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
                watch.fed.append((past.get_seq_length() if past is not None else 0, ids.shape[1]))
            spans.append([time.perf_counter(), 0.0])

        return hook

    def end(spans: list[list[float]]) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            spans[-1][1] = time.perf_counter()

        return hook

    hooks = []
    for model, spans in ((target, watch.spans), (drafter, watch.drafts)):
        if model is not None:
            hooks.append(model.register_forward_pre_hook(begin(spans), with_kwargs=True))
            hooks.append(model.register_forward_hook(end(spans)))
    try:
        yield watch
    finally:
        for hook in hooks:
            hook.remove()
