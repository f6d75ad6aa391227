"""The one decode loop: draft → verify → commit → roll back, for any drafter and any number of rows.

Shapes: B rows still decoding, N nodes in a draft, L committed tokens of a row, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.device import Clock, to_device
from decode.draft import Contexts, Draft, Limits
from decode.drafters import Drafter
from decode.errors import UserError
from decode.logits import LogitsProcessor
from decode.parts import Part, make_policy, make_rule
from decode.policies import Policy
from decode.rules import Rule
from decode.sampling import CounterRNG, Sampling
from decode.stats import Counts, Tally, Timing
from decode.target.cached_model import CachedLM
from decode.target.hidden_states import Features
from decode.text_stream import Stop
from decode.verification import Decision, Observer, Scores, Verification

OnTokens = Callable[[int, list[int]], None]


@dataclass
class Decoded:
    """The result of a decode. outputs[i] answers prompts[i], with the EOS if it was emitted."""

    outputs: list[list[int]]
    tally: Tally
    timing: Timing
    steps: list[Verification] = field(default_factory=list)

    @property
    def counts(self) -> Counts:
        return self.tally.pooled()

    def to_dict(self) -> dict[str, Any]:
        """Everything except the prompts, as JSON values: token ids, pooled counts and figures (also
        by position), milliseconds by part, and every step."""
        return {
            "outputs": self.outputs,
            **self.counts.to_dict(),
            "timing": self.timing.to_dict(),
            "per_step": [step.to_dict() for step in self.steps],
        }


def require_prompts(prompts: Sequence[Sequence[int]], max_positions: int, vocab_size: int) -> None:
    """Raise UserError for prompts (token ids) that cannot be decoded: no prompts, an empty prompt,
    a prompt that fills the context, or ids outside the vocabulary. The message gives the index of
    the prompt."""
    if not prompts:
        raise UserError("there are no prompts to decode")
    for row, prompt in enumerate(prompts):
        if not len(prompt):
            raise UserError(f"prompt {row} is empty; a model needs at least one token")
        if len(prompt) >= max_positions:
            raise UserError(
                f"prompt {row} has {len(prompt)} tokens and the target's context holds "
                f"{max_positions}, so there is no room for an answer; shorten the prompt"
            )
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise UserError(
                f"prompt {row} has token ids from {min(prompt)} to {max(prompt)}; expected ids "
                f"from 0 to {vocab_size - 1}. Use the target's tokenizer"
            )


class Decoder:
    """A target, a drafter, a rule and a draft-length policy, ready to decode.

    gamma: the depth of every draft, at least 1. Ignored for drafts with a fixed depth
        (`Drafter.max_depth`), and if a policy is given.
    policy, rule: an instance, or a name with options (`decode.parts`). policy None: `fixed`.
        rule None: `speculative`, or `multi_round` for trees. At temperature 0, exact match replaces
        the rules that are equivalent to it there.
    sampling: how text is drawn. draft_sampling: how the drafter draws, if different.
    processors: as `transformers`' LogitsProcessorList. They change the target's logits after the
        repetition penalty, before temperature and filters. They must keep no state between calls,
        because they see rejected drafts too.
    stop: ends a text, in addition to the EOS ids and the length limit.
    observers: called with every verification pass except the prefill, after the drafter.
    first_target: the prefill pass yields the first token, so every draft follows a token of the
        target. If False, the first token is drafted and verified like all others. The text is the
        same (when sampled: its distribution), each prompt takes one more pass, and the counts
        include that token. This helps to debug a drafter right after a prompt.

    Raises UserError if γ < 1 or γ reaches the context length, for an unknown rule, a rule that
    cannot judge this drafter's drafts, a policy that watches chains for a drafter of trees, or a
    drafter with another vocabulary.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: Drafter,
        *,
        eos_token_ids: Sequence[int] = (),
        gamma: int = 4,
        rule: Part | Rule | None = None,
        sampling: Sampling | None = None,
        draft_sampling: Sampling | None = None,
        policy: Part | Policy | None = None,
        processors: Sequence[LogitsProcessor] = (),
        stop: Stop | None = None,
        observers: Sequence[Observer] = (),
        first_target: bool = True,
    ) -> None:
        self.drafter = drafter
        self.sampling = sampling or Sampling()
        self.draft_sampling = draft_sampling or self.sampling
        name, branches = type(drafter).__name__, drafter.branches
        siblings = drafter.siblings(self.draft_sampling)
        self.rule = make_rule(rule, self.sampling, name, branches, siblings)
        self.policy = make_policy(policy, drafter.max_depth(gamma), name, branches)
        self.lm = CachedLM(model, captured_layers=drafter.captured_layers)
        if self.policy.max_depth >= self.lm.max_positions:
            raise UserError(
                f"drafts of depth {self.policy.max_depth} do not fit into the target's context of "
                f"{self.lm.max_positions} tokens, text included; choose a smaller gamma, "
                "or a shallower tree"
            )
        self.processors = list(processors)
        self.stop = stop
        self.observers = list(observers)
        self.first_target = first_target
        self.vocab_size: int = model.config.get_text_config().vocab_size
        if drafter.vocab_size not in (None, self.vocab_size):
            raise UserError(
                f"{name} has a vocabulary of {drafter.vocab_size} tokens, but the target's has "
                f"{self.vocab_size}; use a drafter made for this target. If the tokenizers are "
                "the same and only the padding differs, open the drafter by its name "
                "(`open_drafter`)"
            )
        self.eos = np.array(sorted(eos_token_ids), dtype=np.int64)

    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        seed: int = 0,
        row_ids: Sequence[int] | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Decoded:
        """Continue all prompts (token ids) together, to their ends. Arguments are as for
        `Decoding`."""
        decoding = Decoding(
            self, prompts, max_new_tokens, seed=seed, row_ids=row_ids, on_tokens=on_tokens
        )
        while not decoding.finished:
            decoding.step()
        return decoding.result()


class Decoding:
    """A batch of texts that is being decoded: `prefill` (on creation), then one `step` after the
    other, each followed by `retire`, until it is `finished`.

    Every text ends with an EOS, after `max_new_tokens`, or at the end of the model's context.
    seed, row_ids: the random numbers of a row depend on the seed and on the row's id. With the
        row's index in a larger set as its id, its text is the same in any batch, in float32 (see
        `CounterRNG`). Default: the row's index in `prompts`.
    on_tokens: called with (row, new tokens) as soon as they are final.

    A decoder and its drafter can run only one decode at a time. Raises UserError if there are no
    prompts, if a prompt is empty, leaves no room for an answer or has ids outside the vocabulary,
    if logits are NaN, and if processors mask all logits.
    """

    def __init__(
        self,
        decoder: Decoder,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        seed: int = 0,
        row_ids: Sequence[int] | None = None,
        on_tokens: OnTokens | None = None,
    ) -> None:
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {max_new_tokens}; expected at least 1")
        max_positions = decoder.lm.max_positions
        require_prompts(prompts, max_positions, decoder.vocab_size)
        self.clock = Clock(decoder.lm.device, Timing())
        self.decoder, self.on_tokens = decoder, on_tokens
        lengths = np.array([len(prompt) for prompt in prompts])
        self.ends = np.minimum(lengths + max_new_tokens, max_positions)  # max length of each row
        # In a ragged batch, a row near its end is still fed a draft as deep as the others.
        capacity = int(self.ends.max()) + decoder.drafter.max_nodes(decoder.policy.max_depth)
        tokens = np.zeros((len(prompts), capacity), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
        self.contexts = Contexts(tokens, lengths)
        self.rows = np.arange(len(prompts))  # the prompt index of each row that still decodes
        identities = np.asarray(self.rows if row_ids is None else row_ids)
        self.rng = CounterRNG(seed, to_device(identities, decoder.lm.device))
        self.outputs: list[list[int]] = [[] for _ in prompts]
        self.steps: list[Verification] = []
        self._features: Features | None = None  # the hidden states of the last pass
        self._passes = 0  # verification passes, without the prefill
        self._drafted = False
        self.prefill()

    @property
    def finished(self) -> bool:
        return not len(self.rows)

    @property
    def emitted(self) -> int:
        """The number of tokens that all rows have got so far."""
        return sum(map(len, self.outputs))

    @torch.inference_mode()
    def prefill(self) -> None:
        """The target reads the prompts, which gives the first token of each row. It is the
        verification of an empty draft."""
        decoder, contexts = self.decoder, self.contexts
        rows, capacity = contexts.tokens.shape
        if decoder.stop:
            decoder.stop.start(rows)
        decoder.lm.reset(rows, capacity)
        fed = contexts.lengths - (not decoder.first_target)
        ids = to_device(contexts.tokens[:, : int(fed.max())], decoder.lm.device)
        columns = np.maximum(fed - 1, 0)
        zeros = np.zeros(rows, dtype=np.int64)
        logits = torch.zeros(rows, 1, 1)
        if ids.shape[1]:
            logits = decoder.lm.forward(ids, zeros, columns=columns)
        nothing, device = Draft.none(rows, decoder.lm.device), decoder.lm.device
        if decoder.first_target:
            scores = Scores(logits, decoder.sampling, nothing, contexts, decoder.processors)
            none = torch.zeros(rows, dtype=torch.int64, device=device)
            first = scores.pick(self.rng.uniforms(CounterRNG.NEXT, 0, 1))[:, 0]
            decision = Decision(nothing.tokens, accepted=none, reached=none, next_token=first)
            verification = Verification.of(nothing, scores, decision)
        else:  # no token yet: the first step verifies the first token like all others
            scores = Scores(logits, decoder.sampling)
            empty, broken = np.zeros((rows, 0), dtype=np.int64), zeros.astype(bool)
            verification = Verification(
                nothing, scores, nothing.tokens, zeros, zeros, empty, broken
            )
        self._commit(verification, zeros)
        self.clock.mark("prefill")
        decoder.drafter.start(contexts)
        self._tell_drafter(verification, fed)
        decoder.policy.start(rows)
        self.clock.mark("draft_prefill")
        self.retire(verification)

    @torch.inference_mode()
    def step(self) -> None:
        """One verification pass: draft, verify, commit the accepted tokens, roll back the rest."""
        decoder, contexts, clock = self.decoder, self.contexts, self.clock
        clock.resume()
        self._passes += 1
        self.rng.next_round(contexts.lengths)
        # The pass itself emits a token, so drafting the last one is never worth it. Each row has
        # its own limit. Otherwise its text would depend on the other rows.
        depths = np.minimum(decoder.policy.depths(), self.ends - contexts.lengths - 1)
        draft = self._draft(depths)
        clock.mark("draft")
        start = contexts.lengths - 1
        logits = self._forward(draft, start)
        clock.mark("verify")
        scores = Scores(logits, decoder.sampling, draft, contexts, decoder.processors)
        verification = Verification.of(draft, scores, decoder.rule.decide(draft, scores, self.rng))
        if not draft.is_chain:
            decoder.lm.commit(start, verification.columns(), verification.accepted + 1)
        self._commit(verification, depths)
        self._tell_drafter(verification, verification.accepted + 1)
        for observer in decoder.observers:
            observer(verification)
        clock.mark("overhead")
        clock.give(verification, at_once=decoder.policy.reads_times)
        decoder.policy.observe(verification)
        self.steps.append(verification)
        self.retire(verification)

    def retire(self, verification: Verification) -> None:
        """Hand out the new tokens of a pass, and drop the rows whose text has ended."""
        for index, row in enumerate(self.rows):
            tokens = verification.block[index, : verification.emitted[index]].tolist()
            self.outputs[row] += tokens
            if self.on_tokens and tokens:
                self.on_tokens(int(row), tokens)
        verification.release()
        if verification.ended.any():
            kept = np.flatnonzero(~verification.ended)
            self.rows, self.ends = self.rows[kept], self.ends[kept]
            if len(kept):
                on_device = to_device(kept, self.decoder.lm.device)
                self.decoder.lm.keep_rows(on_device)
                self.decoder.drafter.keep_rows(on_device)
                self.decoder.policy.keep_rows(kept)
                self.rng.keep_rows(on_device)
                self.contexts.keep_rows(kept)
                if self._features is not None and self.decoder.observers:
                    self._features = self._features.keep_rows(kept)
        self.clock.mark("overhead")

    def result(self) -> Decoded:
        self.clock.finish()
        tally = Tally(len(self.outputs), self.decoder.policy.max_depth)
        for step in self.steps:
            tally.add(step)
        timing = replace(
            self.clock.timing,
            steps=len(self.steps),
            draft_steps=sum(step.draft_steps for step in self.steps),
            tokens_fed=sum(step.width for step in self.steps),
        )
        return Decoded(self.outputs, tally, timing, self.steps)

    def _draft(self, depths: np.ndarray) -> Draft:
        """The draft of each row, at most depths[b] deep, int [B]."""
        decoder = self.decoder
        if not depths.any():
            return Draft.none(len(depths), decoder.lm.device)
        if not self._drafted:
            # Not earlier: a policy may decode a complete text without a draft.
            decoder.drafter.prefill(self.contexts)
            self.clock.mark("draft_prefill")
            self._drafted = True
        limits = Limits(depths, decoder.policy.stops if decoder.policy.watches else None)
        draft = decoder.drafter.draft(self.contexts, limits, decoder.draft_sampling, self.rng)
        draft = draft.to(decoder.lm.device)
        draft.limit_depth(depths)
        return draft

    def _forward(self, draft: Draft, start: np.ndarray) -> Tensor:
        """One target pass over the last committed token, in slot start[b], and the draft: logits
        [B, N+1, V]."""
        lm = self.decoder.lm
        last = np.take_along_axis(self.contexts.tokens, start[:, None], axis=1)
        ids = torch.cat([to_device(last, lm.device), draft.tokens], 1)
        if draft.is_chain:
            return lm.forward(ids, start)
        # The root comes before all nodes, and every node may see it.
        ancestors = torch.nn.functional.pad(draft.ancestors(), (1, 0, 1, 0))
        ancestors[:, :, 0] = True
        return lm.forward(ids, start, depth_BN=ancestors.sum(2) - 1, ancestors_BNM=ancestors)

    def _commit(self, verification: Verification, depths: np.ndarray) -> None:
        """Append the emitted tokens to the texts, and complete the record of the pass. Raises
        UserError for logits that give no token."""
        contexts, draft = self.contexts, verification.draft
        verification.number, verification.rows = self._passes, self.rows
        verification.contexts, verification.lengths = contexts, contexts.lengths
        verification.require_usable()
        new = np.minimum(verification.accepted + 1, verification.block.shape[1])
        verification.emitted, verification.ended = self._cut(verification.block, new)
        columns = np.arange(verification.block.shape[1])[None, :]
        row, column = np.nonzero(columns < verification.emitted[:, None])
        contexts.tokens[row, contexts.lengths[row] + column] = verification.block[row, column]
        contexts.lengths = contexts.lengths + verification.emitted
        verification.depths, verification.drafted = depths, draft.sizes
        verification.nodes_by_depth = draft.nodes_by_depth()
        verification.width = 1 + draft.tokens.shape[1]
        # A policy that stopped a draft has seen the logits of one more token.
        depth = int(verification.nodes_by_depth.any(0).sum())
        verification.draft_steps = max(depth, self.decoder.policy.watched)

    def _cut(self, block: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(how many of the `new` [B] tokens of each block are emitted, int [B]; whether the text
        ends with them, bool [B])."""
        room = self.ends - self.contexts.lengths
        emitted = np.minimum(new, room)
        inside = np.arange(block.shape[1])[None, :] < emitted[:, None]
        is_eos = np.isin(block, self.decoder.eos) & inside
        ended = is_eos.any(1)
        emitted = np.where(ended, is_eos.argmax(1) + 1 if is_eos.size else 0, emitted)
        ended = ended | (emitted == room)
        if self.decoder.stop:
            for index, row in enumerate(self.rows):
                tokens = block[index, : emitted[index]].tolist()
                kept = self.decoder.stop.cut(int(row), tokens)
                if kept is not None:
                    emitted[index], ended[index] = kept, True
        return emitted, ended

    def _tell_drafter(self, verification: Verification, counts: np.ndarray) -> None:
        """Give the pass to the drafter, with the hidden states of the tokens that stay in the text,
        counts[b] of those fed, int [B]."""
        if self.decoder.drafter.captured_layers and counts.any():
            verification.previous_features = self._features
            self._features = Features(self.decoder.lm.features, counts)
            if verification.number:
                self._features = self._features.at(verification.positions(), counts)
            verification.features = self._features
        self.decoder.drafter.observe(verification)
