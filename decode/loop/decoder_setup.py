"""What decodes: target, drafter, rule and draft-length policy, and how text is drawn."""

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedModel

from decode.base.errors import require_fits, require_whole
from decode.base.threads import OneAtATime
from decode.drafters import Drafter, NoDrafter
from decode.draw.logits import LogitsProcessor
from decode.draw.sampling import Sampling
from decode.lengths import Policy
from decode.loop.parts import Part, Parts
from decode.loop.rows import RowSettings
from decode.model.cache.cached_model import CachedLM
from decode.model.cache.pass_size import PASS_TOKENS
from decode.model.cache.prefix_cache import PrefixCache
from decode.model.memory import affordable_slots
from decode.rules import Rule
from decode.rules.exact import used_rule
from decode.text_stream import Stop
from decode.verification import Observer


def eos_ids(given: Sequence[int] | int | None) -> list[int]:
    """The ids that end a text, given as in a generation config. Raises UserError unless they are
    whole numbers."""
    if given is None:
        return []
    ids = list(given) if isinstance(given, Sequence) else [given]
    for token in ids:
        require_whole(0, eos_token_id=token)
    return [int(token) for token in ids]


class Setup:
    """A target, a drafter, a rule and a draft-length policy that fit each other.

    model: the target, or an object in the place of its `CachedLM`, such as a target on another
        machine.
    drafter: None: nothing is drafted, which is plain decoding.
    eos_token_ids: the ids that end a text; one id, or None, as in a generation config, too.
    gamma: the depth of every draft, at least 1. Ignored for drafts with a fixed depth
        (`Drafter.max_depth`), and if a policy is given.
    policy, rule: an instance, or a name with options (`decode.loop.parts`). policy None: `fixed`.
        rule None: `speculative`, or `multi_round` for trees. At temperature 0, exact match replaces
        the rules that are equivalent to it there.
    sampling: how text is drawn. draft_sampling: how the drafter draws, if different.
    processors: as `transformers`' LogitsProcessorList. They change the target's logits after the
        repetition penalty, before temperature and filters. They must keep no state between calls,
        because they see rejected drafts too.
    stop: ends a text, in addition to the EOS ids and the length limit.
    observers: called with every verification pass except the prefill, after the drafter.
    prefill_tokens: how many tokens of prompts a pass reads, over all rows. Longer prompts take
        several passes, so no pass has a mask or activations for all of a long prompt.
    prefixes: keys and values of earlier texts, for prompts that begin like them, and the hidden
        states that the drafter reads. None: every prompt is read completely.
    first_target: the prefill pass yields the first token, so every draft follows a token of the
        target. If False, the first token is drafted and verified like all others. The text is the
        same (when sampled: its distribution), each prompt takes one more pass, and the counts
        include that token. This helps to debug a drafter right after a prompt.
    numbers_repeat: whether a drafter that learns may remember a text that was drawn with the same
        random numbers. Such a drafter gets other numbers in each decode. Set it to False if each
        text has numbers of its own, or if the drafter forgets first.

    Raises UserError if γ < 1 or γ reaches the context length, for an unknown rule, a rule that
    cannot judge this drafter's drafts, a policy that watches chains for a drafter of trees, or a
    drafter with another vocabulary.
    """

    def __init__(
        self,
        model: PreTrainedModel | CachedLM,
        drafter: Drafter | None,
        *,
        eos_token_ids: Sequence[int] | int | None = (),
        gamma: int = 4,
        rule: Part | Rule | None = None,
        sampling: Sampling | None = None,
        draft_sampling: Sampling | None = None,
        policy: Part | Policy | None = None,
        processors: Sequence[LogitsProcessor] = (),
        stop: Stop | None = None,
        observers: Sequence[Observer] = (),
        prefill_tokens: int = PASS_TOKENS,
        prefixes: PrefixCache | None = None,
        first_target: bool = True,
    ) -> None:
        self.sampling = sampling or Sampling()
        self.draft_sampling = draft_sampling or self.sampling
        self.usual = RowSettings(self.sampling, 0, stop, draft_sampling=self.draft_sampling)
        parts = Parts.of(NoDrafter() if drafter is None else drafter, rule, policy, gamma)
        parts.require_sampling([(self.sampling, self.draft_sampling)])
        require_fits(lambda x: x >= 1, "at least 1", prefill_tokens=prefill_tokens)
        cached = isinstance(model, CachedLM)
        self.lm = model if cached else CachedLM(model, pass_tokens=prefill_tokens)
        self.vocab_size = self.lm.vocab_size
        parts.require_target(self.lm, self.vocab_size)
        self.use(parts)
        self.stop = stop
        self.processors, self.observers = list(processors), list(observers)
        self.prefixes, self.first_target = prefixes, first_target
        self.numbers_repeat = True
        self._turn = OneAtATime("this decoder")
        self.eos = np.array(sorted(eos_ids(eos_token_ids)), dtype=np.int64)

    def use(self, parts: Parts) -> None:
        """Decode with these parts, which fit."""
        self.parts, self.drafter, self.policy = parts, parts.drafter, parts.policy
        self.rule = used_rule(parts.rule, self.sampling)
        self.lm.capture(parts.drafter.captured_layers)

    def slots(self, length: int, max_new_tokens: int) -> int:
        """How many slots a prompt of `length` tokens and its answer need. In a ragged batch, a row
        near its end is still fed a draft as deep as the others."""
        end = min(length + max_new_tokens, self.lm.max_positions)
        return end + self.drafter.max_nodes(self.policy.max_depth)

    def affordable_slots(self, rows: int, length: int) -> int:
        """How many slots to allocate from the start for each row, for texts of `length`
        tokens: fewer than they need if keys and values would take over half of the free memory."""
        return affordable_slots(self.lm.model, rows, self.slots(length, 0))
