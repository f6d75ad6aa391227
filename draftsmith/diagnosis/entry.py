"""A diagnosis: measured there, measured here, and explained."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from decode.base.errors import UserError
from decode.drafters import DRAFTERS, Drafter
from decode.model.loading import Target
from decode.opening.directory import describe_drafter, open_drafter
from draftsmith.auditing.engine_acceptance import COUNTING
from draftsmith.diagnosis.counts import accepted_by_place, drafts_along
from draftsmith.diagnosis.engine import measure_server, measure_together, ready, template_fault
from draftsmith.diagnosis.explain import ALONE, EQUAL, NONE, SEEN, Explanation, as_keys, explain
from draftsmith.diagnosis.mistakes import MISTAKES
from draftsmith.export.compare_acceptance import Acceptance
from draftsmith.export.engine_kinds import EngineTask
from draftsmith.export.import_directory import import_drafter
from heads.heads_directory import read_heads
from heads.heads_drafter import HeadsDrafter
from train.engines.counters import DraftCounts
from train.settings.server_config import ServerConfig

# Pairs are tried with this many of the likeliest single mistakes.
PAIRED = 3
PAIR = 0.1  # how likely a second mistake is
PLUS = " + "  # between the names of a pair
# Requests at a time, after one at a time.
TOGETHER = (8, 16)
FEWEST_PROMPTS = 20
# A server chooses the length of its drafts if more than this share of the prompts got shorter ones.
MOST_SHORTER = 0.5


@dataclass(frozen=True)
class OfLength:
    """Prompts of so many tokens, and the tokens accepted of one there and here."""

    shortest: int
    longest: int
    there: float
    here: float

    @classmethod
    def halves(
        cls, prompts: Sequence[Sequence[int]], there: np.ndarray, here: np.ndarray
    ) -> list["OfLength"]:
        """The shorter half of the prompts and the longer. there, here: int [N, places]."""
        lengths = np.array([*map(len, prompts)])
        found = []
        for some in np.array_split(np.argsort(lengths, kind="stable"), 2):
            accepted = (float(x[some].sum(1).mean()) for x in (there, here))
            found.append(cls(int(lengths[some[0]]), int(lengths[some[-1]]), *accepted))
        return found


@dataclass(frozen=True)
class Diagnosis:
    """there, here: accepted tokens by place of a draft, per prompt; in the sum over all places if
    the engine does not say them by place. mistakes: how many hypotheses were tried, pairs among
    them. alone: what the engine counts with one request at a time. together: the same of the same
    prompts with several at a time, by their number. by_length: of the shorter half of the prompts,
    and of the longer. template: how the server's chat
    template differs from the target's; None: it does not, as far as the server says."""

    engine: str
    prompts: int
    there: list[float]
    here: list[float]
    mistakes: int
    explanation: Explanation
    gamma: int
    alone: DraftCounts
    together: dict[int, DraftCounts]
    by_length: list[OfLength]
    template: str | None = None

    @property
    def sound(self) -> bool:
        """Whether the engine does what the drafter can, on messages too."""
        equal = self.explanation.verdict == EQUAL
        return equal and not self.mixed and self.template is None

    @property
    def mixed(self) -> list[int]:
        """The numbers of requests at a time at which the engine accepts less than of one."""
        found = []
        for requests, counts in self.together.items():
            less = (counts.rate or 0.0) < (self.alone.rate or 0.0)
            # Greedy texts of one target: what chance may change is in the tolerance.
            if less and Acceptance(counts, self.alone, self.gamma, 1.0, 0.0).fault:
                found.append(requests)
        return found

    @property
    def headline(self) -> str:
        """The findings and their remedies."""
        if self.template is None:
            return self._of_tokens
        return (
            f"another chat template: {self.template}. Remedy: start the server with the template "
            "and the arguments (thoughts on or off) that the drafter was trained with, or train it "
            f"with the server's. With prompts as token ids: {self._of_tokens}"
        )

    @property
    def _of_tokens(self) -> str:
        if not self.mixed:
            return self._of_one_request
        shares = ", ".join(
            f"{self.together[x].rate or 0.0:.1%} with {x} at a time" for x in self.mixed
        )
        return (
            f"rows mixed at concurrency: {self.alone.rate or 0.0:.1%} of the draft tokens are "
            f"accepted with one request at a time, and {shares}. Remedy: use a version of the "
            f"engine that keeps the drafter's states of each request apart. With one at a time: "
            f"{self._of_one_request}"
        )

    @property
    def _of_one_request(self) -> str:
        found = self.explanation
        if found.verdict == EQUAL:
            return (
                "equal: the engine does what the drafter can. Train it more, or on texts like "
                "these prompts"
            )
        if found.verdict == NONE:
            return (
                f"none of {self.mistakes} known mistakes explains the engine's counts; the server "
                "may have another drafter than this one"
            )
        said = "; or ".join(
            f"{name}: " + "; and ".join(f"{x.says}. Remedy: {x.remedy}" for x in parts)
            for name in found.names
            if (parts := [MISTAKES[one] for one in name.split(PLUS)])
        )
        if found.little:
            names = ", ".join(found.names)
            return (
                f"the engine accepts almost nothing, as with one of: {names}. A mistake that is "
                f"not known may do the same. {said}"
            )
        return said if len(found.names) == 1 else f"one of: {', '.join(found.names)}. {said}"

    def to_dict(self) -> dict[str, Any]:
        """Return the diagnosis as JSON values."""
        found = self.explanation
        return {
            "engine": self.engine,
            "prompts": self.prompts,
            "verdict": found.verdict,
            "like": list(found.like),
            "little": found.little,
            "posterior": found.posterior,
            "accepted_there": self.there,
            "accepted_here": self.here,
            "agreement": found.agreement,
            "unseen": list(found.unseen),
            "drafted_alone": self.alone.drafted,
            "accepted_alone": self.alone.accepted,
            "together": {
                str(requests): {"drafted": x.drafted, "accepted": x.accepted}
                for requests, x in self.together.items()
            },
            "mixed": self.mixed,
            "by_length": [vars(x) for x in self.by_length],
            "template": self.template,
            "headline": self.headline,
        }


def diagnose(
    url: str,
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    config: ServerConfig,
    *,
    gamma: int,
    say: Callable[[str], None] = lambda line: None,
) -> Diagnosis:
    """Say why the drafter accepts what it does in the server at `url`.

    prompts: token ids. gamma: the tokens of the server's drafts. The server is asked one request at
    a time, greedily, for γ + 2 tokens: the first one comes from the prompt, then there is room for
    a whole draft and the token after it. Raises UserError as `measure_server`, for too few
    prompts and for prompts that do not fit.
    """
    tokens = gamma + 2
    require_enough(len(prompts))
    require_positions(target, prompts, tokens + gamma + 1)
    engine = ready(url, config, gamma)
    made = {EQUAL: drafter} | {
        name: changed
        for name in MISTAKES
        if (changed := MISTAKES[name](tokens).make(drafter, target)) is not None
    }
    say(f"our own loop, with the drafter and {len(made) - 1} mistakes")
    here = _Here(target, prompts, engine, gamma, tokens)
    by_name = here.counts(made)
    say(f"asking {url} for {len(prompts)} answers, one after the other")
    there = measure_server(
        url, target, prompts, here.texts, config, gamma=gamma, tokens=tokens, say=say
    )
    _require_whole_drafts(url, (there.drafted < here.fewest).mean(), gamma)
    counted = as_keys(there.accepted)
    weights = {name: SEEN for name in made if name != EQUAL and engine in MISTAKES[name].engines}
    said = {name: as_keys(there.in_its_form(x)) for name, x in by_name.items()}
    explanation = explain(counted, said, weights)
    agreement = explanation.agreement.get(explanation.verdict, 0.0)
    if explanation.verdict != EQUAL and not explanation.little and agreement < ALONE:
        pairs = _pairs(made, explanation.agreement, target, tokens)
        if pairs:
            say(f"no mistake alone explains all of it; trying {len(pairs)} pairs")
            for name, x in here.counts(pairs).items():
                parts = name.split(PLUS)
                keys = as_keys(there.in_its_form(x))
                if all(keys != said[part] for part in parts):  # else one of them says it all
                    said[name] = keys
                    weights[name] = PAIR * math.prod(weights.get(part, 1.0) for part in parts)
            explanation = explain(counted, said, weights)
    shown, own = (x.mean(0).tolist() for x in (there.accepted, there.in_its_form(by_name[EQUAL])))
    alone = DraftCounts(float(there.drafted.sum()), float(there.accepted.sum()))
    together = {}
    for requests in TOGETHER:
        say(f"asking for the same answers, {requests} at a time")
        together[requests] = measure_together(
            url, target, prompts, here.texts, config, requests=requests, tokens=tokens
        )
    by_length = OfLength.halves(prompts, there.accepted, by_name[EQUAL])
    template = template_fault(url, target, prompts[0], config)
    return Diagnosis(
        engine, len(prompts), shown, own, len(said) - 1, explanation, gamma, alone, together,
        by_length, template,
    )  # fmt: skip


def cause_in_engine(trained: Path | None, task: EngineTask, config: ServerConfig) -> str:
    """Why the engine at the URL of `config` accepts what it does. trained: the directory of the
    drafter whose export it has; None: it is not there, and the export itself is imported. Raises
    UserError as `diagnose`, `open_plain` and `import_drafter`."""
    with TemporaryDirectory() as directory:
        if trained is None:
            trained = Path(directory) / "drafter"
            import_drafter(str(task.export), task.target, trained)
        drafter = open_plain(trained, task.target)
    return diagnose(
        config.urls[0], task.target, drafter, task.prompts, config, gamma=task.gamma, say=task.say
    ).headline


def require_enough(prompts: int) -> None:
    """Raise UserError for too few prompts."""
    if prompts < FEWEST_PROMPTS:
        raise UserError(
            f"there are {prompts} prompts; expected at least {FEWEST_PROMPTS}, and better 200"
        )


def require_positions(target: Target, prompts: Sequence[Sequence[int]], tokens: int) -> None:
    """Raise UserError for prompts whose answers of `tokens` tokens the target has no room for."""
    longest = max(map(len, prompts)) + tokens
    if longest > target.max_positions:
        raise UserError(
            f"the longest prompt and its answer are {longest} tokens, but {target.name} has "
            f"{target.max_positions} positions; shorten the prompts"
        )


def _require_whole_drafts(url: str, shorter: float, gamma: int) -> None:
    """Raise UserError if too many of the prompts got fewer draft tokens than is possible."""
    if shorter > MOST_SHORTER:
        raise UserError(
            f"{url} drafts fewer than {gamma} tokens at a time for {shorter:.0%} of the prompts: "
            f"it chooses the length of its drafts. Expected drafts of {gamma} tokens; start it "
            "with a fixed length (draftsmith serve: --policy fixed; llama-server: "
            "--spec-draft-p-min 0)"
        )


def open_plain(path: Path, target: Target) -> Drafter:
    """A drafter from its directory. The weights of heads stay as they are stored, so that mistakes
    can change them; those of `open_drafter` may be packed. Raises UserError as `open_drafter`."""
    opened = open_drafter(str(path), target)
    if not isinstance(opened, HeadsDrafter) or describe_drafter(path)["kind"] not in DRAFTERS:
        return opened
    heads = read_heads(path, target).to(target.device, opened.heads.dtype)
    if heads.vocabulary is not None:
        heads.vocabulary = heads.vocabulary.to(target.device)
    heads.borrow(target.model, opened.heads.dtype, target.device)
    return type(opened)(heads, target.vocab_size)


class _Here:
    """Our own measurement, counted as the engine counts. texts: the target's own. fewest: the draft
    tokens of each prompt, int [N], of the drafter that needs the fewest."""

    def __init__(
        self,
        target: Target,
        prompts: Sequence[Sequence[int]],
        engine: str,
        gamma: int,
        tokens: int,
    ) -> None:
        self._target, self._prompts = target, prompts
        self._counting, self._gamma, self._tokens = COUNTING[engine], gamma, tokens
        self.texts: list[list[int]] = []
        self.fewest = np.full(len(prompts), np.iinfo(np.int64).max)

    def counts(self, drafters: dict[str, Drafter]) -> dict[str, np.ndarray]:
        """{name: accepted tokens by place, int [N, γ]}."""
        drafts = drafts_along(
            self._target, [*drafters.values()], self._prompts, self._gamma, self._tokens,
            first_drafted=self._counting.first_drafted,
        )  # fmt: skip
        self.texts = drafts.texts.tolist()
        eos = self._target.eos_token_ids
        accepted = {}
        for member, name in enumerate(drafters):
            drafted, accepted[name] = accepted_by_place(
                drafts, member, self._counting, eos, self._tokens
            )
            self.fewest = np.minimum(self.fewest, drafted.sum(1))
        return accepted


def _pairs(
    made: dict[str, Drafter], agreement: dict[str, float], target: Target, tokens: int
) -> dict[str, Drafter]:
    """Each pair with one of the mistakes that explain most prompts."""
    names = sorted(name for name in made if name != EQUAL)
    near = set(sorted(names, key=lambda name: -agreement[name])[:PAIRED])
    pairs = {}
    for first, second in combinations(names, 2):
        if not near & {first, second}:
            continue
        changed = MISTAKES[second](tokens).make(made[first], target)
        if changed is not None:
            pairs[first + PLUS + second] = changed
    return pairs
