"""What a rule sees of a draft, and what it decides.

Shapes: B rows, N draft nodes, R = N+1 positions where a token is predicted (position 0 follows the
committed text, position i+1 follows node i), D draft tokens on the longest path, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from decode.base.device import dtype_name, reads_are_free, to_device
from decode.base.errors import UserError
from decode.draft import Contexts, Draft
from decode.draw.logits import LogitsProcessor, change
from decode.draw.sampling import Sampling
from decode.draw.top import peaks
from decode.model.cache.real_tokens import Listed


class Scores:
    """The target's logits for a draft. Computes only what a rule asks for: all distributions, one
    distribution per row, or tokens.

    It gets logits [B, R, V], or those of the tokens that were fed (`Listed`).

    logits: [B, R, V], after penalties, processors and the constraints of the texts, in
    this order, before temperature and filters. float32 if a penalty or a processor changed them,
    else in the model's dtype. raw: the logits as the model returned them. failed: what a processor
    or a constraint raised, by row, as the error of `failure` takes it. Their logits are NaN.
    """

    def __init__(
        self,
        logits: Tensor | Listed,
        sampling: Sampling,
        draft: Draft | None = None,
        contexts: Contexts | None = None,
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        self._raw = logits
        self.sampling = sampling
        self.failed: dict[int, tuple[str, Exception]] = {}
        guides = None if contexts is None else contexts.guides
        if sampling.penalises or processors or guides is not None:
            assert draft is not None
            assert contexts is not None
            ancestors = draft.ancestors()
            # Not `pad`: before torch 2.10 it refuses a draft without nodes.
            root = ancestors.new_zeros(len(ancestors), 1, ancestors.shape[2])
            before = torch.cat([root, ancestors], 1)  # [B, R, N]
            text = (contexts.tokens, contexts.lengths, draft.tokens, before)
            answers = contexts.answers
            logits = self.raw
            logits, self.failed = change(logits, sampling, processors, guides, answers, *text)
        self._logits = logits
        self._probs: Tensor | None = None
        self._found: tuple[Tensor, Tensor] | None = None

    @property
    def raw(self) -> Tensor:
        if isinstance(self._raw, Listed):
            self._raw = self._raw.padded()
        return self._raw

    @property
    def logits(self) -> Tensor:
        if isinstance(self._logits, Listed):
            self._logits = self.raw
        return self._logits

    def emitted(
        self, draw: Callable[[Sampling, Tensor, Tensor], Tensor], numbers: Tensor | None
    ) -> Tensor:
        """int64 [B, R]: the token that the target emits at each position: the likeliest, or as
        `draw` draws with these numbers, [B, R]."""
        logits = self._logits
        if numbers is None:
            return self._peaks()[0]
        if not isinstance(logits, Listed):
            return draw(self.sampling, logits, numbers)
        real = logits.real
        rows, columns = (to_device(x, numbers.device) for x in (real.rows, real.columns))
        sampling, each = self.sampling.at(rows), numbers[rows, columns]
        return logits.each(lambda values: draw(sampling, values, each))

    def probs(self) -> Tensor:
        """float32 [B, R, V]: the distributions that tokens are drawn from."""
        if self._probs is None:
            self._probs = self.sampling.probs(self.logits)
        return self._probs

    def probs_at(self, positions: Tensor) -> Tensor:
        """float32 [B, V]: the distribution at one position of each row, int64 [B]. A tree has many
        more positions than a walk through it visits."""
        return self.sampling.probs(self.logits_at(positions))

    def probs_of(self, rows: Tensor, positions: Tensor) -> Tensor:
        """float32 [n, V]: the distributions at some positions of some rows, int64 [n] each."""
        return self.sampling.at(rows).probs(self.logits[rows, positions])

    def logits_at(self, positions: Tensor) -> Tensor:
        """[B, V]: the processed logits at one position of each row, int64 [B]."""
        return self.logits[torch.arange(len(positions), device=positions.device), positions]

    def _peaks(self) -> tuple[Tensor, Tensor]:
        """[B, R] each; see `peaks`."""
        if self._found is None:
            logits = self._logits
            if isinstance(logits, Listed):
                places, most = peaks(logits.values)
                self._found = logits.real.padded(places), logits.real.padded(most)
            else:
                self._found = peaks(logits)
        return self._found

    def peaks_at(self, positions: Tensor) -> Tensor:
        """[B, P]: the largest processed logit at some positions of each row, int64 [B, P]. It is
        not finite if the model's logits are NaN or the processors mask all tokens."""
        logits = self._logits
        # What was drawn from only some distributions of a tree has not read all of them.
        some = not isinstance(logits, Listed) and positions.shape[1] < logits.shape[1]
        if some and self._found is None:
            rows_B1 = torch.arange(len(positions), device=positions.device)[:, None]
            return self.logits[rows_B1, positions].amax(-1)
        return self._peaks()[1].gather(1, positions)


@dataclass(eq=False, repr=False)
class Decision:
    """What a rule decides, on the device.

    path: int64 [B, D], the accepted nodes by depth. Past accepted[b] it is padding. accepted,
    reached: int64 [B], as in `Verification`. next_token: int64 [B], the token after the accepted
    ones.
    """

    path: Tensor
    accepted: Tensor
    reached: Tensor
    next_token: Tensor

    @classmethod
    def of_chain(cls, draft: Draft, accepted: Tensor, next_token: Tensor) -> "Decision":
        """For chains, which may be empty: the first accepted[b] tokens."""
        rows, nodes = draft.tokens.shape
        return cls(
            path=torch.arange(nodes, device=accepted.device).expand(rows, -1),
            accepted=accepted,
            reached=torch.minimum(accepted + 1, draft.valid().sum(1)),
            next_token=next_token,
        )

    def replaced(self, rows: Tensor, other: "Decision") -> "Decision":
        """The same, where another decision holds for these rows, bool [B]."""
        depth = max(self.path.shape[1], other.path.shape[1])
        path, its_path = (
            torch.nn.functional.pad(x, (0, depth - x.shape[1])) for x in (self.path, other.path)
        )
        return Decision(
            torch.where(rows[:, None], its_path, path),
            torch.where(rows, other.accepted, self.accepted),
            torch.where(rows, other.reached, self.reached),
            torch.where(rows, other.next_token, self.next_token),
        )

    @property
    def positions(self) -> Tensor:
        """int64 [B, D+1]: the positions along the path, first the one after the committed text."""
        # Not `torch.nn.functional.pad`, whose checks take longer.
        return torch.constant_pad_nd(self.path + 1, (1, 0))


@dataclass(eq=False, repr=False, kw_only=True)
class Verdict:
    """What a rule decided about a draft, on the host.

    draft: the draft. scores: the target's logits after the text and after each node.
    positions: int64 [B, D+1] on the device, the positions of `scores` along the accepted path,
        first the one after the committed text. Past accepted[b] they are padding.
    nodes: int64 [B, D], the accepted nodes by depth.
    tokens: int64 [B, N], the tokens of the draft on the host.
    accepted: int [B], the number of accepted draft tokens.
    reached: int [B], the number of judged draft positions whose predecessors were all accepted.
    block: int64 [B, D+1], the accepted tokens of each row, then the target's next token. A text
        that ends inside the block is not cut.
    broken: bool [B], whether any logits along the accepted path were NaN, infinite or all masked.
    lost: bool [B], whether those after the text were.
    """

    draft: Draft
    scores: Scores
    positions: Tensor
    nodes: np.ndarray
    tokens: np.ndarray
    accepted: np.ndarray
    reached: np.ndarray
    block: np.ndarray
    broken: np.ndarray
    lost: np.ndarray

    @classmethod
    def read(cls, draft: Draft, scores: Scores, decision: Decision) -> "Verdict":
        """The decision of a rule, on the host: in one transfer from a device. On a CPU the arrays
        share the memory of its tensors."""
        positions, depth = decision.positions, decision.path.shape[1]
        is_finite, every = scores.peaks_at(positions).isfinite(), draft.tokens
        if reads_are_free(positions.device):
            accepted, reached = decision.accepted.numpy(), decision.reached.numpy()
            following, finite = decision.next_token.numpy(), is_finite.numpy()
            nodes, tokens = decision.path.numpy(), every.numpy()
        else:
            figures = torch.stack([decision.accepted, decision.reached, decision.next_token], 1)
            parts = figures, is_finite, decision.path, every
            host = torch.cat(parts, 1).cpu().numpy()
            accepted, reached, following = host[:, :3].T
            finite, nodes, tokens = np.split(host[:, 3:], [depth + 1, 2 * depth + 1], 1)
        block, broken = following[:, None], finite[:, 0] == 0
        lost = broken
        if depth:  # plain decoding has time for few operations
            row = np.arange(len(accepted))
            block = np.zeros((len(row), depth + 1), dtype=np.int64)
            block[:, :depth] = tokens[row[:, None], nodes]
            block[row, accepted] = following
            broken = ((finite == 0) & (np.arange(depth + 1) <= accepted[:, None])).any(1)
        return cls(
            draft=draft,
            scores=scores,
            positions=positions,
            nodes=nodes,
            tokens=tokens,
            accepted=accepted,
            reached=reached,
            block=block,
            broken=broken,
            lost=lost,
        )

    @classmethod
    def without_draft(
        cls, rows: int, device: torch.device, logits: Tensor | None = None
    ) -> "Verdict":
        """Nothing was drafted, and the text gets no token."""
        draft, zeros = Draft.none(rows, device), np.zeros(rows, dtype=np.int64)
        no, empty = np.zeros(rows, dtype=bool), zeros[:, None][:, :0]
        return cls(
            draft=draft,
            scores=Scores(torch.zeros(rows, 1, 1) if logits is None else logits, Sampling()),
            positions=torch.zeros(rows, 1, dtype=torch.int64, device=device),
            nodes=empty,
            tokens=empty,
            accepted=zeros,
            reached=zeros,
            block=empty,
            broken=no,
            lost=no,
        )

    def columns(self) -> np.ndarray:
        """The positions on the host: the columns of the last forward that stay in the cache."""
        columns = np.zeros_like(self.block)
        columns[:, 1:] = self.nodes + 1
        return columns

    def problem(self, row: int, where: str) -> UserError:
        """The error of a broken row: it says whether the model or a logits processor is the
        cause. row: an index. where: the place in the decode."""
        on_path = self.positions[row, : int(self.accepted[row]) + 1]
        if not self.scores.raw[row, on_path].amax(-1).isfinite().all():
            dtype = dtype_name(self.scores.raw.dtype)
            return UserError(
                f"the target's logits are NaN or infinite {where}; check its weights, or use a "
                f"dtype with more range than {dtype}"
            )
        if row in self.scores.failed:
            what, error = self.scores.failed[row]
            return failure(what, where, error)
        return UserError(
            f"the logits processors mask all tokens {where}; at least one logit must be finite: "
            "remove the processor that masks them all, or let it keep a token. With a grammar, let "
            "the processors keep a token that it allows"
        )


def failure(what: str, where: str, error: Exception) -> UserError:
    """The error of a row for which something that the user gave raised an exception."""
    wrapped = UserError(f"{what} fails {where}: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
