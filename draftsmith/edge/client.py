"""Decoding at the edge: the drafter here, the target behind a verification server."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from decode.base.errors import UserError
from decode.drafters import Drafter
from decode.draw.sampling import Sampling
from decode.lengths import Policy
from decode.loop.decoded import Decoded
from decode.loop.decoding import Decoder, Decoding, OnTokens
from decode.loop.parts import Part
from decode.loop.rows import require_prompts
from decode.model.identity import Fingerprint, require_same_vocabulary
from decode.model.loading import Target, resolve_device, resolve_dtype
from decode.text_stream import Stop
from draftsmith.edge.link import Link
from draftsmith.edge.protocol import SAMPLING
from draftsmith.edge.remote_target import EdgeRound, Opening, RemoteLM, RemoteVerdict


class RemoteTarget(Target):
    """A target without its model, to open drafters for: its tokenizer, and what the server says."""

    def __init__(
        self, link: Link, tokenizer: Any, fingerprint: Fingerprint, *, dtype: str, device: str
    ) -> None:
        """fingerprint: the fingerprint of the tokenizer here. dtype, device: where drafters run, as
        for `load_target`. Raises UserError if the server's target has another vocabulary."""
        link.ready()
        expected = Fingerprint.from_dict(link.welcome["fingerprint"])
        require_same_vocabulary(fingerprint, expected, "the tokenizer at the edge", padding=True)
        super().__init__(None, tokenizer, link.url, None, expected, expected.eos_token_ids)
        self._device = resolve_device(device)
        self._dtype = resolve_dtype(dtype, self._device)
        self._max_positions = link.welcome["max_positions"]

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def has_encoder(self) -> bool:
        """A server verifies texts of decoders only."""
        return False

    @property
    def max_positions(self) -> int:
        return int(self._max_positions)


class EdgeClient:
    """Drafts here and sends token ids to a verification server. Drafter, policy and loop are those
    of decoding alone.

    link: to the server. drafter: drafts chains and reads only tokens. gamma, policy, stop: as for
    `Decoder`. sampling: how the server draws. draft_temperature: as for `DecodeSettings`.
    rounds: every draft with its verdict, since the client was made.

    The text is exactly that of decoding with the server's rule at the server, if both sides use the
    same seed and row ids; with the rule `threshold` and a temperature above 0 drafts are drawn by
    rounds, so this needs drafts of the same lengths. Raises UserError as `Decoder` does, for drafts
    that are trees, for drafters that read hidden states, and for a grammar.
    """

    def __init__(
        self,
        link: Link,
        drafter: Drafter,
        *,
        gamma: int = 4,
        policy: Part | Policy | None = None,
        sampling: Sampling | None = None,
        draft_temperature: float | None = None,
        stop: Stop | None = None,
    ) -> None:
        self.rounds: list[EdgeRound] = []
        sampling = sampling or Sampling()
        usual = {name: getattr(sampling, name) for name in SAMPLING}
        if sampling != Sampling(**usual):
            raise UserError(
                f"a verification server takes no grammar, and of a sampling only {list(usual)}; "
                "leave the others out, or decode without the server"
            )
        drafts = sampling
        if draft_temperature is not None:
            drafts = replace(sampling, temperature=draft_temperature)
        self._lm = RemoteLM(link, sampling, self.rounds.append)
        self.decoder = Decoder(
            self._lm,
            drafter,
            eos_token_ids=link.welcome["fingerprint"]["eos_token_ids"],
            gamma=gamma,
            rule=RemoteVerdict(self._lm),
            # The server draws the text; here its tokens are only read.
            sampling=Sampling(),
            draft_sampling=drafts,
            policy=policy,
            stop=stop,
            first_target=False,
        )

    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        seed: int = 0,
        row_ids: Sequence[int] | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Decoded:
        """Continue all prompts (token ids) to their ends. Arguments are as for `Decoder.decode`.
        Raises UserError also if the server does not answer or refuses a text."""
        require_prompts(prompts, self._lm.max_positions, self.decoder.vocab_size)
        ids = range(len(prompts)) if row_ids is None else row_ids
        self._lm.openings = [
            Opening(prompt, max_new_tokens, seed, row)
            for prompt, row in zip(prompts, ids, strict=True)
        ]
        decoding = Decoding(
            self.decoder, prompts, max_new_tokens, seed=seed, row_ids=row_ids, on_tokens=on_tokens
        )
        while not decoding.finished:
            decoding.step(self._lm.credit)
        return decoding.result()

    def close(self) -> None:
        """End the session at the server."""
        self._lm.link.close()


def summary(rounds: Sequence[EdgeRound]) -> dict[str, float | int | None]:
    """Many rounds in a few figures: their number, means of the draft length, of accepted / drafted
    tokens and of all times in milliseconds, and all bytes. A figure is None without rounds."""

    def mean(read: Callable[[EdgeRound], float]) -> float | None:
        return round(float(np.mean([read(one) for one in rounds])), 3) if rounds else None

    drafted = sum(one.k for one in rounds)
    times = ("rtt_ms", "wall_ms", "verify_ms", "queue_ms", "prefill_ms")
    return {
        "rounds": len(rounds),
        "mean_k": mean(lambda one: one.k),
        "la_k": round(sum(one.accepted for one in rounds) / drafted, 4) if drafted else None,
        **{name: mean(lambda one, name=name: getattr(one, name)) for name in times},  # type: ignore[misc]
        "bytes_up": sum(one.bytes_up for one in rounds),
        "bytes_down": sum(one.bytes_down for one in rounds),
    }
