"""The questions of an audit: what the server is asked for each, and how its answers are judged."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from decode.base.errors import UserError, require_whole
from decode.drafters import Drafter
from decode.draw.sampling import Sampling
from decode.model.loading import DTYPES, Target
from draftsmith.auditing import engine_acceptance, exact
from draftsmith.auditing.asking import AskedTexts, ask_texts, gives_several
from draftsmith.auditing.audit_options import AuditOptions
from draftsmith.auditing.beside import beside_findings
from draftsmith.auditing.contract import contract_findings
from draftsmith.auditing.findings import Finding, Judgement
from draftsmith.auditing.greedy import greedy_findings
from draftsmith.auditing.sampled import sampled_findings
from draftsmith.auditing.texts import JudgedText, TextJudge, rounding_scale
from draftsmith.export.compare_acceptance import OwnLoop
from train.settings.server_config import ServerConfig


@dataclass(frozen=True)
class Questions:
    """urls: of the server, and of the baseline if there is one. drafter: the server's, for our own
    loop with drafts of gamma tokens; None: not compared. say: called with what is done.
    log_probabilities: whether greedy answers are asked for them."""

    urls: Sequence[str]
    target: Target
    prompts: Sequence[Sequence[int]]
    options: AuditOptions
    config: ServerConfig
    say: Callable[[str], None]
    drafter: Drafter | None
    gamma: int
    log_probabilities: bool = True

    @property
    def level(self) -> float:
        """Of each part of the audit that chance could call wrong: together they have the audit's
        (Bonferroni)."""
        is_drawn = not self.options.sampling.greedy
        compared = self.drafter is not None
        parts = (True, compared, is_drawn, is_drawn, is_drawn and compared, self.short_answers > 0)
        return self.options.level / sum(parts)

    @property
    def short_answers(self) -> int:
        """How many are asked for, for their joint law."""
        if self.options.sampling.greedy:
            return 0
        wanted = self.options.exact
        if wanted is None:
            tiny = self.target.token_count <= exact.TINY_VOCABULARY
            wanted = exact.TEXTS if tiny and len(self.urls) == 1 else 0
        return wanted

    def require(self) -> None:
        """Raise UserError for what would be refused in any part, before the server is asked."""
        if self.options.exact and self.options.sampling.greedy:
            raise UserError(
                f"exact is {self.options.exact}, but the temperature is 0; short answers are "
                "drawn, so set a temperature above 0, or leave exact out"
            )
        if self.options.exact and len(self.urls) > 1:
            raise UserError(
                f"exact is {self.options.exact}, but there is a baseline, whose law is the one "
                "to keep to; short answers are judged by the target's, so leave one of them out"
            )
        if self.drafter is not None:
            require_whole(1, gamma=self.gamma)
        if self.drafter is not None and (depth := self.drafter.max_depth(self.gamma)) < self.gamma:
            raise UserError(
                f"gamma is {self.gamma}, but the drafter drafts at most {depth} tokens; give the "
                "number that the server drafts"
            )
        if self.short_answers:
            count = min(exact.PROMPTS, len(self.prompts))
            self.say(
                f"enumerating the first {self.options.exact_tokens} tokens after {count} prompts"
            )
            _ = self.laws

    @cached_property
    def laws(self) -> list[exact.Laws]:
        """Of the short answers. Raises UserError if there are too many texts."""
        prompts, tokens = self.prompts[: exact.PROMPTS], self.options.exact_tokens
        return exact.exact_laws(self.target, prompts, self.options.sampling, tokens)

    def greedy(self) -> list[Finding]:
        # Greedy, with the same penalties.
        sampling = replace(self.options.sampling, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
        asked, texts, worth = self._watched(sampling, 1)
        findings = [_contract("greedy", asked)]
        if not texts:
            return findings
        if len(self.urls) == 1:
            return [*findings, *greedy_findings(texts, self.level), *worth]
        plain, of_plain, missing = self._of_baseline("greedy", sampling, 1)
        findings += [*missing, *worth]
        if not of_plain:
            return findings
        findings += greedy_findings(texts, self.level, of_plain)
        return [*findings, engine_acceptance.speed_finding(asked.speed, plain.speed)]

    def sampled(self) -> list[Finding]:
        sampling = self.options.sampling
        asked, texts, worth = self._watched(sampling, self.options.samples)
        findings = [_contract("sampled", asked)]
        if len(self.urls) == 1:
            return [*findings, *sampled_findings(texts, self.level), *worth]
        _, baseline, missing = self._of_baseline("sampled", sampling, self.options.samples)
        findings += [*missing, *worth]
        return [*findings, *beside_findings(texts, baseline, self.level)] if baseline else findings

    def contract(self) -> list[Finding]:
        self.say("asking for streams, stop strings and seeds")
        return contract_findings(
            self.urls[0],
            self.target,
            self.prompts,
            self.options.sampling,
            self.config,
            max_new_tokens=self.options.max_new_tokens,
            seed=self.options.seed,
            level=self.level,
            repeats=self.options.rounding is None and self._dtype == torch.float32,
        )

    @property
    def _dtype(self) -> torch.dtype:
        """What the engine computes in."""
        name = self.options.engine_dtype
        return DTYPES[name] if name else self.target.dtype

    def exact(self) -> list[Finding]:
        """None without short answers to ask for."""
        if not (wanted := self.short_answers):
            return []
        prompts, tokens = self.prompts[: exact.PROMPTS], self.options.exact_tokens
        each = exact.ANSWERS_EACH if gives_several(self.config.protocol) else 1
        samples = -(-wanted // (len(prompts) * each))
        self.say(f"asking {self.urls[0]} for {samples * len(prompts) * each} short answers")
        asked = ask_texts(
            self.urls[0],
            self.target,
            prompts,
            self.options.sampling,
            self.config,
            samples=samples,
            max_new_tokens=tokens,
            seed=self.options.seed,
            each=each,
        )
        findings = exact.exact_findings(asked.texts, self.laws, self.level)
        return [_contract(exact.GROUP, asked), *findings]

    def _watched(
        self, sampling: Sampling, samples: int
    ) -> tuple[AskedTexts, list[JudgedText], list[Finding]]:
        """As `_judged`, and what the server's counters say meanwhile."""
        key = self.config.key()
        before = engine_acceptance.counters_if_shown(self.urls[0], key)
        asked, texts = self._judged(self.urls[0], sampling, samples)
        counted, engine = asked.counts, "llamacpp"
        if (
            before is not None
            and (after := engine_acceptance.counters_if_shown(self.urls[0], key)) is not None
        ):
            counted, engine = after.counts - before.counts, after.engine
        elif not counted.drafted:
            return asked, texts, []
        own = None
        if self.drafter is not None:
            self.say("our own loop with the same drafter")
            prompts = [prompt for prompt in self.prompts for _ in range(samples)]
            own = OwnLoop(
                self.target, self.drafter, prompts, self.gamma, self.options.max_new_tokens
            )
        parted = [bool((text.gap > 0).any()) for text in texts] or [True]
        finding = engine_acceptance.acceptance_finding(
            "greedy" if sampling.greedy else "sampled", counted, engine, own, sampling,
            level=self.level, parting=sum(parted) / len(parted) if sampling.greedy else 1.0,
        )  # fmt: skip
        return asked, texts, [finding]

    def _of_baseline(
        self, group: str, sampling: Sampling, samples: int
    ) -> tuple[AskedTexts, list[JudgedText], list[Finding]]:
        """As `_judged`, and a finding if answers are missing; it costs their comparisons only."""
        try:
            asked, texts = self._judged(self.urls[1], sampling, samples, later=1)
        except UserError as error:
            asked, texts = AskedTexts(left_out=[str(error)]), []
        count = samples * len(self.prompts)
        if len(texts) >= count:
            return asked, texts, []
        detail = (
            f"{count - len(texts)} of {count} are missing or cannot be judged, so that what is "
            f"beside them is not compared; the first: {[*asked.left_out, *asked.faults][0]}"
        )
        verdict = Judgement.EQUAL if texts else Judgement.UNJUDGED
        return asked, texts, [Finding(group, "answers of the baseline", verdict, detail)]

    def _judged(
        self, url: str, sampling: Sampling, samples: int, later: int = 0
    ) -> tuple[AskedTexts, list[JudgedText]]:
        """The answers of a server, and the judgement of each. later: added to the seed of the
        requests, so that two servers draw with different numbers."""
        count = samples * len(self.prompts)
        # Of two in a request, so that those of one request are seen to be independent.
        each = 2 if samples % 2 == 0 and gives_several(self.config.protocol) else 1
        self.say(f"asking {url} for {count} {'greedy' if sampling.greedy else 'sampled'} answers")
        asked = ask_texts(
            url,
            self.target,
            self.prompts,
            sampling,
            self.config,
            samples=samples // each,
            each=each,
            max_new_tokens=self.options.max_new_tokens,
            seed=self.options.seed + later,
            logprobs=sampling.greedy and self.log_probabilities,
        )
        options = self.options
        self.say(f"judging {sum(len(text.tokens) for text in asked.texts)} tokens")

        def judged(scale: float) -> list[JudgedText]:
            judge = TextJudge(
                self.target, sampling, options.seed, self._dtype, options.rounding, scale
            )
            return [judge.judge(text) for text in asked.texts]

        texts = judged(1.0)
        if sampling.greedy and options.rounding is None and (scale := rounding_scale(texts)) > 1:
            texts = judged(scale)
        return asked, texts


def _contract(group: str, asked: AskedTexts) -> Finding:
    """The finding about usage and ends of answers."""
    name, count = "ends and usage", len(asked.texts)
    left_out = ""
    if asked.left_out:
        left_out = (
            f"; {len(asked.left_out)} cannot be judged and are left out, the first: "
            f"{asked.left_out[0]}"
        )
    if asked.faults:
        detail = f"{len(asked.faults)} faults in {count} answers; the first: {asked.faults[0]}"
        return Finding(group, name, Judgement.WRONG, detail + left_out)
    detail = f"{count} answers end as they say{left_out}"
    verdict = Judgement.EQUAL if count else Judgement.UNJUDGED
    return Finding(group, name, verdict, detail)
