"""The one decode loop: draft → verify → commit → roll back, for any drafter and any number of rows.

Shapes: B rows still decoding, N nodes in a draft, L committed tokens of a row, V vocabulary.
"""

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.draft import Draft
from decode.drafters import Contexts, Drafter, Limits
from decode.errors import UserError
from decode.logits import LogitsProcessor, Scores
from decode.policies import Policy
from decode.policies.fixed import Fixed
from decode.rules import RULES, Rule, Verdict, default_rule, require_fitting, used_rule
from decode.sampling import CounterRNG, Sampling
from decode.stats import Counts, Step, Tally, Timing
from decode.target.cached_model import CachedLM
from decode.target.hidden_states import Features
from decode.text_stream import Stop
from decode.trace import TraceStep, trace_rows
from decode.verification import Judged, Observer, Verified

OnTokens = Callable[[int, list[int]], None]


@dataclass
class Decoded:
    """The result of a decode. outputs[i] answers prompts[i], with the EOS if it was emitted."""

    outputs: list[list[int]]
    tally: Tally
    timing: Timing
    steps: list[Step] = field(default_factory=list)

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
                f"{max_positions}, which leaves no room for an answer; shorten it"
            )
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise UserError(
                f"prompt {row} has token ids from {min(prompt)} to {max(prompt)}; the target "
                f"knows 0 to {vocab_size - 1}. Use its own tokenizer"
            )


class Decoder:
    """A target, a drafter, a rule and a draft-length policy, ready to decode.

    gamma: the depth of every draft, at least 1. Ignored for drafts with a fixed depth
        (`Drafter.deepest`), and if a policy is given.
    policy: decides the depth of each draft.
    rule: an instance, or a name from `RULES`. None: `speculative`, or `multi_round` for trees. At
        temperature 0, exact match replaces the rules that are equivalent to it there.
    sampling: how text is drawn. draft_sampling: how the drafter draws, if different.
    processors: as `transformers`' LogitsProcessorList. They change the target's logits after the
        repetition penalty, before temperature and filters. They must keep no state between calls,
        because they see rejected drafts too.
    stop: ends a text, in addition to the EOS ids and the length limit.
    observers: called with every verification pass.
    first_target: the prefill pass yields the first token, so every draft follows a token of the
        target. If False, the first token is drafted and verified like all others. The text is the
        same (when sampled: its distribution), each prompt takes one more pass, and the counts
        include that token. This helps to debug a drafter right after a prompt.

    Raises UserError if γ < 1 or γ reaches the context length, for an unknown rule, a rule that
    cannot judge this drafter's drafts, or a drafter with another vocabulary.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: Drafter,
        *,
        eos_token_ids: Sequence[int] = (),
        gamma: int = 4,
        rule: str | Rule | None = None,
        sampling: Sampling | None = None,
        draft_sampling: Sampling | None = None,
        policy: Policy | None = None,
        processors: Sequence[LogitsProcessor] = (),
        stop: Stop | None = None,
        observers: Sequence[Observer] = (),
        first_target: bool = True,
    ) -> None:
        self.policy = policy or Fixed(drafter.deepest(gamma))
        self.sampling = sampling or Sampling()
        self.draft_sampling = draft_sampling or self.sampling
        rule = rule or default_rule(drafter.branches)
        chosen = RULES[rule]() if isinstance(rule, str) else rule
        self.rule: Rule = used_rule(chosen, self.sampling)
        self.drafter = drafter
        siblings = drafter.siblings(self.draft_sampling)
        require_fitting(self.rule, type(drafter).__name__, drafter.branches, siblings)
        if self.policy.watches and drafter.branches:
            raise UserError(
                f"the draft-length policy {type(self.policy).__name__} watches a chain grow, and "
                f"{type(drafter).__name__} drafts trees; leave the policy out, or let it draft in "
                "the shape chain"
            )
        self.lm = CachedLM(model, captured_layers=drafter.captured_layers)
        if self.policy.most >= self.lm.max_positions:
            raise UserError(
                f"drafts of depth {self.policy.most} do not fit into the target's context of "
                f"{self.lm.max_positions} tokens, text included; choose a smaller gamma, "
                "or a shallower tree"
            )
        self.processors = list(processors)
        self.stop = stop
        self.observers = [*observers, *([drafter.verified] if drafter.observes else [])]
        self.first_target = first_target
        self._vocab_size: int = model.config.get_text_config().vocab_size
        self._require_same_vocabulary()
        self.eos = np.array(sorted(eos_token_ids), dtype=np.int64)

    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        seed: int = 0,
        row_ids: Sequence[int] | None = None,
        on_tokens: OnTokens | None = None,
        on_step: Callable[[TraceStep], None] | None = None,
    ) -> Decoded:
        """Continue all prompts (token ids) together, each until EOS, `max_new_tokens` or the end
        of the model's context.

        row_ids: the identity of each row. Its random numbers depend on it and on the seed. With
            the row's index in a larger set, its text is the same in any batch, in float32 (see
            `CounterRNG`). Default: the row's index in `prompts`.
        on_tokens: called with (row, new tokens) as soon as they are final.
        on_step: see `decode.trace`.
        Raises UserError if there are no prompts, if a prompt is empty, leaves no room for an answer
        or has ids outside the vocabulary, if logits are NaN, and if processors mask all logits.
        """
        passes = self.decoding(
            prompts,
            max_new_tokens,
            seed=seed,
            row_ids=row_ids,
            on_tokens=on_tokens,
            on_step=on_step,
        )
        while True:
            try:
                next(passes)
            except StopIteration as end:
                done: Decoded = end.value
                return done

    @torch.inference_mode()
    def decoding(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        seed: int = 0,
        row_ids: Sequence[int] | None = None,
        on_tokens: OnTokens | None = None,
        on_step: Callable[[TraceStep], None] | None = None,
    ) -> Generator[int, None, Decoded]:
        """`decode`, pass by pass: yields after the prefill and after each verification pass except
        the last, and returns the same result as `decode`.

        Yields the number of tokens that all rows have emitted so far. Time between two passes is
        not counted. A decoder and its drafter can run only one decode at a time.
        """
        ends = self._ends(prompts, max_new_tokens)
        clock = _Clock(self.lm.device)
        rows = np.arange(len(prompts))  # the prompt index of each row that still decodes
        device = self.lm.device
        contexts = self._contexts(prompts, ends)
        identities = np.asarray(rows if row_ids is None else row_ids)
        rng = CounterRNG(seed, torch.as_tensor(identities, device=device))
        tally = Tally(len(prompts), self.policy.most)
        steps: list[Step] = []
        outputs: list[list[int]] = [[] for _ in prompts]

        if self.stop:
            self.stop.start(len(rows))
        fed = contexts.lengths - (not self.first_target)
        block = self._prefill(contexts, fed, rng)
        first = np.full(len(rows), block.shape[1])
        emitted, ended = self._cut(rows, block, first, ends - contexts.lengths)
        self._append(contexts, block, emitted)
        clock.mark("prefill")
        self.drafter.start(contexts)
        read: Features | None = None
        if self.drafter.captured_layers and fed.any():
            read = Features(self.lm.features, fed)
            self.drafter.read(read)
        self.policy.start(len(rows))
        clock.mark("draft_prefill")
        said, has_drafted = 0, False

        while True:
            said += int(emitted.sum())
            for place, row in enumerate(rows):
                new = block[place, : emitted[place]].tolist()
                outputs[row] += new
                if on_tokens and new:
                    on_tokens(int(row), new)
            if ended.any():
                going = np.flatnonzero(~ended)
                if not len(going):
                    break
                self._keep(going, contexts, rng)
                rows, ends = rows[going], ends[going]
                if read is not None and self.observers:
                    read = read.keep_rows(going)
            clock.mark("overhead")
            yield said
            clock.resume()

            rng.next_round(contexts.lengths)
            left = ends - contexts.lengths
            # The pass itself emits a token, so drafting the last one is never worth it. Each row
            # has its own limit. Otherwise its text would depend on the other rows.
            depths = np.minimum(self.policy.depths(), left - 1)
            draft = Draft.none(len(rows), device)
            if depths.any():
                if not has_drafted:
                    # Not earlier: a policy may decode a complete text without a draft.
                    self.drafter.prefill(contexts)
                    clock.mark("draft_prefill")
                    has_drafted = True
                stops = self.policy.stops if self.policy.watches else None
                limits = Limits(depths, stops)
                draft = self.drafter.draft(contexts, limits, self.draft_sampling, rng).to(device)
                draft.limit_depth(depths)
            draft_s = clock.mark("draft")
            logits, start = self._forward(contexts, draft)
            verify_s = clock.mark("verify")
            scores = Scores(logits, self.sampling, draft, contexts, self.processors)
            verdict = self.rule.verify(draft, scores, rng)
            judged = Judged.of(draft, scores, verdict)
            judged.require_usable(scores, verdict, rows, contexts, len(steps) + 1)
            accepted, reached, block = judged.accepted, judged.reached, judged.block
            if not draft.is_chain:
                self.lm.commit(start, verdict.places(), accepted + 1)
            if on_step:
                on_step(trace_rows(rows, draft, scores, verdict, block))

            for observer in self.observers:
                observer(Verified(rows, contexts, draft, scores, verdict, accepted, block, read))
            if self.drafter.captured_layers:
                seen = Features(self.lm.features, accepted + 1)
                read = seen.at(verdict.places(), accepted + 1)
                self.drafter.read(read)

            emitted, ended = self._cut(rows, block, accepted + 1, left)
            by_depth = draft.nodes_by_depth()
            tally.step(rows, by_depth, reached, accepted, emitted, ended)
            self._append(contexts, block, emitted)
            self.drafter.commit(contexts)
            steps.append(
                Step(
                    rows,
                    depths,
                    draft.sizes,
                    reached,
                    accepted,
                    emitted,
                    width=1 + draft.tokens.shape[1],
                    # A policy that stopped a draft has seen the logits of one more token.
                    depth=max(int(by_depth.any(0).sum()), self.policy.asked),
                    draft_s=draft_s,
                    verify_s=verify_s,
                    overhead_s=clock.mark("overhead"),
                )
            )
            self.policy.observe(steps[-1])
            clock.timing.count(steps[-1])
        clock.mark("overhead")
        return Decoded(outputs, tally, clock.timing, steps)

    def _ends(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> np.ndarray:
        """int [B]: the maximum length of each row, prompt included: `max_new_tokens` more than the
        prompt, or the model's last position."""
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {max_new_tokens}; expected at least 1")
        require_prompts(prompts, self.lm.max_positions, self._vocab_size)
        lengths = np.array([len(prompt) for prompt in prompts])
        return np.minimum(lengths + max_new_tokens, self.lm.max_positions)

    def _contexts(self, prompts: Sequence[Sequence[int]], ends: np.ndarray) -> Contexts:
        lengths = np.array([len(prompt) for prompt in prompts])
        # In a ragged batch, a row near its end is still fed a draft as deep as the others.
        capacity = int(ends.max()) + self.drafter.most_nodes(self.policy.most)
        tokens = np.zeros((len(prompts), capacity), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
        return Contexts(tokens, lengths)

    def _prefill(self, contexts: Contexts, lengths: np.ndarray, rng: CounterRNG) -> np.ndarray:
        """Feed the first `lengths` (int [B]) tokens of the prompts and return the next token of
        each row, int64 [B, 1]. Without `first_target` it returns no tokens, [B, 0], and the first
        verification feeds the last token of each prompt."""
        rows, capacity = contexts.tokens.shape
        self.lm.reset(rows, capacity)
        ids = torch.as_tensor(contexts.tokens[:, : int(lengths.max())], device=self.lm.device)
        columns = np.maximum(lengths - 1, 0)
        if ids.shape[1]:
            logits = self.lm.forward(ids, np.zeros(rows, dtype=np.int64), columns=columns)
        if not self.first_target:
            return np.zeros((rows, 0), dtype=np.int64)
        nothing = Draft.none(rows, self.lm.device)
        scores = Scores(logits, self.sampling, nothing, contexts, self.processors)
        picked = scores.pick(rng.uniforms(CounterRNG.NEXT, 0, 1))
        none = torch.zeros_like(picked[:, 0])
        verdict = Verdict(nothing.tokens, none, none, picked[:, 0])
        judged = Judged.of(nothing, scores, verdict)
        judged.require_usable(scores, verdict, np.arange(rows), contexts, 0)
        return judged.block

    def _forward(self, contexts: Contexts, draft: Draft) -> tuple[Tensor, np.ndarray]:
        """One target pass over the last committed token and the draft: logits [B, N+1, V]."""
        start = contexts.lengths - 1
        last = np.take_along_axis(contexts.tokens, start[:, None], axis=1)
        ids = torch.cat([torch.as_tensor(last, device=self.lm.device), draft.tokens], 1)
        if draft.is_chain:
            return self.lm.forward(ids, start), start
        # The root comes before all nodes, and every node may see it.
        ancestors = torch.nn.functional.pad(draft.ancestors(), (1, 0, 1, 0))
        ancestors[:, :, 0] = True
        depth = ancestors.sum(2) - 1
        return self.lm.forward(ids, start, depth_BN=depth, ancestors_BNM=ancestors), start

    def _require_same_vocabulary(self) -> None:
        known = self.drafter.vocab_size
        if known is not None and known != self._vocab_size:
            raise UserError(
                f"{type(self.drafter).__name__} has a vocabulary of {known} tokens and the target "
                f"one of {self._vocab_size}; use a drafter made for this target, or, where the "
                "tokenizers are the same and only the padding differs, open the drafter by "
                "its name (`open_drafter`)"
            )

    def _cut(
        self, rows: np.ndarray, block: np.ndarray, new: np.ndarray, left: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """(how many of the `new` [B] tokens of each block are emitted, int [B]; whether the text
        ends with them, bool [B])."""
        emitted = np.minimum(new, left)
        is_eos = np.isin(block, self.eos) & (np.arange(block.shape[1])[None, :] < emitted[:, None])
        has_eos = is_eos.any(1)
        emitted = np.where(has_eos, is_eos.argmax(1) + 1 if is_eos.size else 0, emitted)
        ended = has_eos | (emitted == left)
        if self.stop:
            for place, row in enumerate(rows):
                kept = self.stop.cut(int(row), block[place, : emitted[place]].tolist())
                if kept is not None:
                    emitted[place], ended[place] = kept, True
        return emitted, ended

    @staticmethod
    def _append(contexts: Contexts, block: np.ndarray, emitted: np.ndarray) -> None:
        columns = np.arange(block.shape[1])[None, :]
        row, column = np.nonzero(columns < emitted[:, None])
        contexts.tokens[row, contexts.lengths[row] + column] = block[row, column]
        contexts.lengths = contexts.lengths + emitted

    def _keep(self, going: np.ndarray, contexts: Contexts, rng: CounterRNG) -> None:
        rows = torch.as_tensor(going, device=self.lm.device)
        self.lm.keep_rows(rows)
        self.drafter.keep_rows(rows)
        rng.keep_rows(rows)
        contexts.keep_rows(going)
        self.policy.keep_rows(going)


class _Clock:
    """Adds the time since the last mark to a part of the step."""

    def __init__(self, device: torch.device) -> None:
        self.timing = Timing()
        self._device = device
        self._last = time.perf_counter()

    def resume(self) -> None:
        """Restart the clock. The time since the last mark is not counted."""
        self._last = time.perf_counter()

    def mark(self, part: str) -> float:
        """Add the seconds since the last mark to `part`, and return them."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        passed, self._last = now - self._last, now
        setattr(self.timing, part, getattr(self.timing, part) + passed)
        return passed
