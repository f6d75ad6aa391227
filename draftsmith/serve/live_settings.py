"""The settings of a running service, and how they change without a restart.

A change is checked completely, and a new drafter is read, before the decoding thread sees it. That
thread then exchanges the parts between two passes.
"""

import hashlib
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decode.base.device import dtype_name
from decode.base.errors import UserError
from decode.base.registry import Choice
from decode.base.threads import run_in_thread
from decode.costs import Costs
from decode.drafters import DRAFTERS, Drafter
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoding
from decode.loop.parts import Parts
from decode.model.loading import Target
from decode.opening.directory import open_drafter, partition_drafters
from decode.rules import RULES, Rule
from decode.rules.lossy_speculative import Lenience
from decode.settings import DecodeSettings
from draftsmith.serve.adapter_routes import AdapterRoutes, path_below
from draftsmith.serve.batching.request_batcher import RequestBatcher
from draftsmith.serve.dynamic_lenience import DynamicLenience, require_low
from draftsmith.serve.openai.openai_requests import SettingsChange

if TYPE_CHECKING:
    from draftsmith.serve.learner import ServiceLearner


class LiveSettings:
    """The settings in use. `change` runs in a thread of its own, one change at a time.

    drafter: the one that the batcher's decoder began with, called `name`. costs: measured with it,
    for policies. dynamic_lenience: the lower bound of l; 1: off. drafters: the directory with those
    that a change may load, besides the first one. adapters: those that can be loaded as routes of
    their own. learner: learns new versions of the first one; None: nothing is learnt.
    """

    def __init__(
        self,
        batcher: RequestBatcher,
        target: Target,
        decode: DecodeSettings,
        name: str,
        *,
        costs: Costs | None,
        dynamic_lenience: float,
        drafters: Path | None,
        adapters: AdapterRoutes,
        learner: "ServiceLearner | None",
    ) -> None:
        self.batcher, self.target, self.decode, self.name = batcher, target, decode, name
        self.drafters, self.adapters, self.learner = drafters, adapters, learner
        self._first = name
        self._drafter = batcher.decoder.drafter  # for rows without an adapter
        self.rule = ""  # with its options, set by the first change
        self.dynamic_lenience = 1.0
        self._costs = costs
        self._changing = threading.Lock()
        self._facts: dict[str, Any] = {}  # of the fingerprint, set by the first change
        batcher.metrics.lenience.set_function(lambda: self.lenience)
        require_low(dynamic_lenience)
        self.change(SettingsChange(dynamic_lenience=dynamic_lenience)).result()

    @property
    def lenience(self) -> float:
        """The l in use. 1 if the rule has none."""
        rule = self.batcher.decoder.parts.rule
        return rule.lenience if isinstance(rule, Lenience) else 1.0

    @property
    def lossy(self) -> str | None:
        """The rule, if it changes the distribution of sampled texts, or also greedy ones."""
        if self.dynamic_lenience < 1:
            return f"{self.rule} with dynamic_lenience={self.dynamic_lenience}"
        return None if self.batcher.decoder.parts.rule.lossless else self.rule

    def lossy_for(self, sampling: Sampling) -> str | None:
        """`lossy` for texts that are drawn so. None if the rule is exact for them."""
        exact = self.batcher.decoder.parts.rule.is_exact_for(sampling)
        return None if exact else self.lossy

    def to_dict(self) -> dict[str, Any]:
        """All settings, and facts on the target, as JSON values."""
        batcher, target, decode = self.batcher, self.target, self.decode
        return {
            "gamma": batcher.decoder.policy.max_depth,
            "policy": str(Choice.of(decode.policy or "fixed")),
            "target": target.name,
            "revision": target.revision,
            "dtype": dtype_name(target.dtype),
            "drafter": self.name,
            "drafter_version": batcher.drafter_version,
            "adapters": list(self.adapters.loaded),
            "rule": self.rule,
            "lenience": self.lenience,
            "dynamic_lenience": self.dynamic_lenience,
            "lossy": self.lossy,
            "sampling": decode.sampling.numbers,
            "draft_temperature": decode.draft_temperature,
            "learning": self.learner is not None and self.learner.learning,
        }

    @property
    def fingerprint(self) -> str:
        """Of all that a text with a seed depends on."""
        facts = self._facts | {"drafter_version": self.batcher.drafter_version}
        return f"fp_{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]}"

    def change(self, asked: SettingsChange) -> Future[None]:
        """Change what is asked for, all of it or nothing. The result arrives once it is in use. It
        is a UserError if the settings do not exist or do not fit each other, the target or the
        running texts, and a Refusal if the service is ending."""
        return self._in_turn(lambda: self._change(asked, self.adapters))

    def change_adapters(
        self, changed: Callable[[AdapterRoutes, DecodeSettings], AdapterRoutes]
    ) -> Future[None]:
        """Load or drop an adapter. changed: gives the routes after it. As `change`."""
        return self._in_turn(
            lambda: self._change(SettingsChange(), changed(self.adapters, self.decode))
        )

    def _in_turn(self, change: Callable[[], None]) -> Future[None]:
        def work() -> None:
            with self._changing:
                change()

        return run_in_thread(work, "settings")

    def _change(self, asked: SettingsChange, adapters: AdapterRoutes) -> None:
        decode, batcher = self._asked_decode(asked), self.batcher
        low = self.dynamic_lenience if asked.dynamic_lenience is None else asked.dynamic_lenience
        name = self.name if asked.drafter is None else asked.drafter
        learning = self._asked_learning(asked, name)
        own, costs = self._drafter, self._costs
        if name != self.name:
            # Costs of one drafter say nothing about another.
            own, costs = self._open(name, decode), None
        fresh = own is not self._drafter or adapters is not self.adapters
        drafter = adapters.around(own)
        named = Choice.of(decode.for_drafter(drafter).rule or "")
        rule: Rule = RULES.make(named)
        dynamic = None
        if low < 1:
            dynamic = DynamicLenience(rule, low, batcher.bounds.max_rows)
            rule = dynamic.rule
        policy = decode.policy_for(drafter, costs)
        parts = Parts.of(drafter, rule, policy, decode.gamma)
        parts.require_sampling([(decode.sampling, decode.draft_sampling)])
        parts.require_target(batcher.decoder.lm)

        def apply(decoding: Decoding) -> None:
            if fresh or (decode, low) != (self.decode, self.dynamic_lenience):
                decoding.set(drafter=drafter if fresh else None, policy=policy, rule=rule)
                batcher.on_waiting = dynamic
            self.decode, self.name, self._costs = decode, name, costs
            self._drafter, self.adapters = own, adapters
            self.dynamic_lenience, self.rule = low, str(named)
            batcher.lossy = None if self.lossy is None else self.lossy_for
            if self.learner is not None:
                self.learner.learning = learning
                self.learner.swap(decoding)
            # The rule has the lenience, but for what traffic makes of it.
            left_out = ("learning", "lenience")
            self._facts = {key: x for key, x in self.to_dict().items() if key not in left_out}

        batcher.between(apply).result()

    def _asked_decode(self, asked: SettingsChange) -> DecodeSettings:
        """The names and options of the parts. Raises UserError."""
        changed: dict[str, Any] = {
            key: getattr(asked, key)
            for key in ("gamma", "policy", "rule")
            if getattr(asked, key) is not None
        }
        if asked.lenience is not None:
            if asked.rule is not None:
                raise UserError(
                    "rule and lenience are both given; lenience: l is short for "
                    "rule: lenience:lenience=l, so leave one of them out"
                )
            changed["rule"] = f"lenience:lenience={asked.lenience}" if asked.lenience < 1 else None
        return replace(self.decode, **changed)

    def _asked_learning(self, asked: SettingsChange, name: str) -> bool:
        """Whether the learner learns after the change. Raises UserError."""
        learner = self.learner
        if learner is None:
            if asked.learning:
                raise UserError("this service was started without --learn, so it cannot learn")
            return False
        learning = learner.learning if asked.learning is None else asked.learning
        if learning and name != learner.name:
            raise UserError(
                f"this service learns new versions of the drafter {learner.name}, but {name} would "
                f"draft; set learning to false, or drafter to {learner.name}"
            )
        return learning

    def _open(self, name: str, decode: DecodeSettings) -> Drafter:
        if self.learner is not None and name == self.learner.name:
            return self.learner.drafter
        located = name if name == self._first else _located(name, self.drafters)
        return decode.shaped(open_drafter(located, self.target))


def _located(name: str, directory: Path | None) -> str:
    """A drafter's name with complete paths. Raises UserError for a path outside `directory`."""

    def is_inside(part: str) -> bool:
        path = path_below(directory, part)
        return path is not None and path.is_dir()

    first, plus, others = partition_drafters(name, is_inside)
    if plus:
        return f"{_located(first, directory)}{plus}{_located(others, directory)}"
    if name.partition(":")[0] in DRAFTERS:
        if "file" in Choice.of(name).options:
            raise UserError(
                f"the drafter {name!r} names a file, and a request cannot name one; name the "
                "layers, or start the service with this drafter"
            )
        return name
    if directory is None:
        raise UserError(
            f"the drafter {name!r} is no name such as ngram, and this service was started without "
            "--drafters DIR, so it loads none from a path"
        )
    path = path_below(directory, name)
    if path is None:
        raise UserError(
            f"the drafter {name!r} is not below the directory of --drafters; give a path in it"
        )
    if not path.is_dir():
        raise UserError(f"there is no drafter directory {name!r} in the directory of --drafters")
    return str(path)
