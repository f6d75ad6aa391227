"""The target behind a link, in the place of the target's model in the decode loop of the edge.

Shapes: B rows, N draft tokens, V vocabulary.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from decode.base.errors import UserError
from decode.draft import Contexts, Draft
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling
from decode.model.cache.cached_model import CachedLM, LayerView
from decode.model.forward.sublayers import Sublayers
from decode.rules import Rule
from decode.verdict import Decision, Scores
from draftsmith.edge.link import Link, LinkLost
from draftsmith.edge.protocol import FRAME_IDS, SAMPLING, Message, hash_ids


@dataclass(frozen=True)
class EdgeRound:
    """One draft and its verdict.

    req, seq: the text, and the number of the draft in it. k: draft tokens. la_k: accepted / k, None
    for k = 0. wall_ms: from the draft to the verdict. queue_ms, prefill_ms, verify_ms: at the
    server: waiting, reading the text, the pass. rtt_ms: wall_ms without the server's time.
    bytes_up, bytes_down: the bytes of the messages, those that opened the text included.
    """

    req: int
    seq: int
    k: int
    accepted: int
    la_k: float | None
    prefill_ms: float
    verify_ms: float
    queue_ms: float
    rtt_ms: float
    wall_ms: float
    bytes_up: int
    bytes_down: int

    def to_dict(self) -> dict[str, float | int | None]:
        """As JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Opening:
    """A text that is about to join. end: its largest length. seed, row: what its random numbers are
    made from."""

    prompt: Sequence[int]
    max_new_tokens: int
    seed: int
    row: int


@dataclass(eq=False)
class _Remote:
    """A text at the server. ids: committed. session: in which it is open, '' for none. connection:
    the line over which its draft was sent. reopened: since the last verdict, because the server had
    another text."""

    req: int
    opening: Opening
    ids: list[int]
    hash: int
    seq: int = 0
    session: str = ""
    draft: list[int] | None = None
    connection: object = None
    reopened: bool = False
    sent: float = 0.0
    bytes_up: int = 0
    verdict: tuple[int, int] = (0, 0)


class RemoteLM(CachedLM):
    """Takes the place of `CachedLM` in a `Decoder`: a pass sends the drafts and waits for the
    verdicts, which `RemoteVerdict` reads. It computes no logits.

    A broken line is made again, and drafts without verdicts are sent again. If the server has
    forgotten a text, it is opened again with all its ids.

    sampling: how the server draws. on_round: called for every verdict. credit: how long drafts may
    be, as the server says. Its methods raise UserError if the server refuses something, or does not
    answer for the link's `patience`.
    """

    repeats_rows = False  # each row is a text at the server
    pass_tokens = 1 << 30
    _scored = 0  # nothing is computed here

    def __init__(
        self,
        link: Link,
        sampling: Sampling,
        on_round: Callable[[EdgeRound], None] = lambda round: None,
    ) -> None:
        # Nothing of the base class is set up: there is no model here.
        link.ready()
        self.link, self._sampling, self.on_round = link, sampling, on_round
        self.device = torch.device("cpu")
        self.features, self.captured_layers = {}, ()
        self.max_positions = link.welcome["max_positions"]
        self.vocab_size = link.welcome["fingerprint"]["vocab_size"]
        self.credit = link.welcome["window"]
        self.openings: list[Opening] = []
        self._texts: list[_Remote] = []
        self._opened = 0

    @property
    def pads(self) -> bool:
        return False

    def capture(self, layers: Sequence[int]) -> None:
        if layers:
            raise UserError(
                "the drafter reads the target's hidden states, which are not sent to the edge; "
                "choose a drafter that reads only tokens"
            )

    def view(self, skipped: Sublayers, embedding: nn.Module | None = None) -> LayerView:
        raise UserError(
            "the drafter runs layers of the target, which is on another machine; choose a drafter "
            "that runs at the edge"
        )

    def reset(self, rows: int, capacity: int, *, keep_states: bool = False) -> None:
        self.keep_rows(np.zeros(0, dtype=np.int64))

    def add_rows(self, count: int, capacity: int) -> None:
        """Open the next `count` of `openings`. The server reads them while the edge drafts."""
        joining, self.openings = self.openings[:count], self.openings[count:]
        for opening in joining:
            ids = list(opening.prompt)
            text = _Remote(self._opened, opening, ids, hash_ids(ids))
            self._opened += 1
            self._texts.append(text)
            try:
                self._open(text)
            except LinkLost:
                self.link.lose()  # `verify` opens it

    def keep_rows(self, rows: np.ndarray) -> None:
        kept = [self._texts[row] for row in rows.tolist()]
        for text in self._texts:
            if text not in kept and text.session == self.link.session:
                try:
                    self.link.send("cancel", req=text.req)
                except LinkLost:
                    self.link.lose()
        self._texts = kept

    def forward(self, ids_BN: Tensor, start: np.ndarray, **options: Any) -> Tensor:
        """The server reads the prompts."""
        return torch.zeros(len(ids_BN), 1, 1)

    def verify(self, contexts: Contexts, draft: Draft, *_: Any, **__: Any) -> Tensor:
        """Send the drafts of all rows, and wait for all verdicts. Returns zeros [B, N+1, 1]."""
        tokens = draft.tokens.tolist()
        self.fed = len(tokens) + int(draft.sizes.sum())
        for row, text in enumerate(self._texts):
            text.draft = tokens[row][: int(draft.sizes[row])]
            text.seq += 1
            text.connection, text.sent = None, time.monotonic()
        self._exchange()
        return torch.zeros(1, 1, 1).expand(len(tokens), draft.tokens.shape[1] + 1, 1)

    def verdicts(self) -> np.ndarray:
        """int64 [B, 2]: accepted draft tokens and the token after them, of the last pass."""
        return np.array([text.verdict for text in self._texts], dtype=np.int64).reshape(-1, 2)

    def _exchange(self) -> None:
        deadline = time.monotonic() + self.link.patience
        while waiting := [text for text in self._texts if text.draft is not None]:
            try:
                self.link.ready(deadline)
                for text in waiting:
                    if text.connection is not self.link.connection:
                        self._open(text)
                        self._send(text)
                message = self.link.receive()
            except LinkLost as error:
                self.link.lose()
                if time.monotonic() > deadline:
                    raise UserError(
                        f"the verifier {self.link.url} gave no verdict in "
                        f"{self.link.patience:g} s ({error}); check the line, or try again later"
                    ) from None
                continue
            about = next((text for text in waiting if text.req == message.get("req")), None)
            if message["type"] == "error":
                self._fail(about, message)
            elif message["type"] == "verdict" and about and message["seq"] == about.seq:
                self._take(about, message)
                deadline = time.monotonic() + self.link.patience

    def _open(self, text: _Remote) -> None:
        if text.session == self.link.session:
            return
        first, rest = text.ids[:FRAME_IDS], text.ids[FRAME_IDS:]
        end = len(text.opening.prompt) + text.opening.max_new_tokens
        text.bytes_up += self.link.send(
            "open",
            req=text.req,
            seq=text.seq - (text.draft is not None),
            length=len(text.ids),
            ids=first,
            max_tokens=end - len(text.ids),
            seed=text.opening.seed,
            row=text.opening.row,
            sampling=[float(getattr(self._sampling, name)) for name in SAMPLING],
        )
        for begin in range(0, len(rest), FRAME_IDS):
            part = rest[begin : begin + FRAME_IDS]
            text.bytes_up += self.link.send("ids", req=text.req, ids=part)
        text.session = self.link.session

    def _send(self, text: _Remote) -> None:
        assert text.draft is not None
        text.bytes_up += self.link.send(
            "draft",
            req=text.req,
            seq=text.seq,
            length=len(text.ids),
            hash=text.hash,
            ids=text.draft,
        )
        text.connection = self.link.connection

    def _fail(self, text: _Remote | None, message: Message) -> None:
        """An error of the server: open the text again if it is forgotten, or if a part of its
        prompt was lost with a line; else raise the error. An error about a text that waits for
        nothing came too late."""
        code = message["code"]
        if text is not None and (code == "request" or (code == "order" and not text.reopened)):
            text.session, text.connection = "", None
            text.reopened |= code == "order"
        elif code != "late" and (text is not None or message["req"] < 0):
            raise UserError(f"the verifier {self.link.url}: {message['message']}")

    def _take(self, text: _Remote, message: Message) -> None:
        """Commit what a verdict says."""
        drafted = text.draft
        assert drafted is not None
        accepted, following = message["accepted"], message["next"]
        tokens = drafted[:accepted] + ([following] if following >= 0 else [])
        text.ids += tokens
        text.hash = hash_ids(tokens, text.hash)
        if accepted > len(drafted) or (len(text.ids), text.hash) != (
            message["length"],
            message["hash"],
        ):
            raise UserError(
                f"the verifier {self.link.url} has another text than the edge after draft "
                f"{text.seq}; this is an error of the server or of the line: begin again"
            )
        text.verdict, text.draft = (accepted, max(following, 0)), None
        text.reopened = False
        self.credit = message["window"]
        wall = 1e3 * (time.monotonic() - text.sent)
        self.on_round(
            EdgeRound(
                text.req,
                text.seq,
                len(drafted),
                accepted,
                accepted / len(drafted) if drafted else None,
                message["prefill_ms"],
                message["verify_ms"],
                message["queue_ms"],
                round(max(wall - message["busy_ms"], 0.0), 3),
                round(wall, 3),
                text.bytes_up,
                message["bytes"],
            )
        )
        text.bytes_up = 0


class RemoteVerdict(Rule):
    """What the server decided. lossless, couples: as the server's rule."""

    trees, exact_when_greedy = False, False

    def __init__(self, lm: RemoteLM) -> None:
        self._lm = lm
        self.lossless, self.couples = lm.link.welcome["lossless"], lm.link.welcome["couples"]

    def decide(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Decision:
        verdicts = torch.as_tensor(self._lm.verdicts())
        return Decision.of_chain(draft, verdicts[:, 0], verdicts[:, 1])
