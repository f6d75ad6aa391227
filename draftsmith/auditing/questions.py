"""The questions of an audit: what the server is asked for each, and how its answers are judged."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decode.base.errors import UserError
from decode.draw.sampling import Sampling
from decode.model.loading import DTYPES, Target
from draftsmith.auditing import exact
from draftsmith.auditing.asking import Asked, ask_texts
from draftsmith.auditing.beside import beside_findings
from draftsmith.auditing.findings import Finding, Verdict
from draftsmith.auditing.greedy import greedy_findings
from draftsmith.auditing.options import AuditOptions
from draftsmith.auditing.sampled import sampled_findings
from draftsmith.auditing.texts import JudgedText, TextJudge
from train.engines.server_config import ServerConfig


@dataclass(frozen=True)
class Questions:
    """urls: of the server, and of the baseline if there is one. say: called with what is done."""

    urls: Sequence[str]
    target: Target
    prompts: Sequence[Sequence[int]]
    options: AuditOptions
    config: ServerConfig
    say: Callable[[str], None]

    def greedy(self) -> list[Finding]:
        sampling = Sampling(repetition_penalty=self.options.sampling.repetition_penalty)
        asked, texts = self._judged(self.urls[0], sampling, 1)
        findings = [_contract("greedy", asked)]
        if not texts:
            return findings
        baseline = self._of_baseline(sampling, 1)
        return [*findings, *greedy_findings(texts, baseline)]

    def sampled(self) -> list[Finding]:
        sampling, level = self.options.sampling, self.options.level
        asked, texts = self._judged(self.urls[0], sampling, self.options.samples)
        findings = [_contract("sampled", asked)]
        baseline = self._of_baseline(sampling, self.options.samples)
        if baseline is None:
            return [*findings, *sampled_findings(texts, level)]
        return [*findings, *beside_findings(texts, baseline, level)]

    def exact(self) -> list[Finding]:
        """None without short answers to ask for."""
        wanted = self.options.exact
        if wanted is None:
            tiny = self.target.token_count <= exact.TINY_VOCABULARY
            wanted = exact.TEXTS if tiny and len(self.urls) == 1 else 0
        if not wanted:
            return []
        prompts, tokens = self.prompts[: exact.PROMPTS], self.options.exact_tokens
        self.say(f"enumerating the first {tokens} tokens after {len(prompts)} prompts")
        laws = exact.exact_laws(self.target, prompts, self.options.sampling, tokens)
        each = exact.ANSWERS_EACH if self.config.protocol == "completions" else 1
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
        findings = exact.exact_findings(asked.texts, laws, self.options.level)
        return [_contract(exact.GROUP, asked), *findings]

    def _of_baseline(self, sampling: Sampling, samples: int) -> list[JudgedText] | None:
        """None without a baseline. Raises UserError for one without answers."""
        if len(self.urls) == 1:
            return None
        _, texts = self._judged(self.urls[1], sampling, samples, later=1)
        if not texts:
            raise UserError(f"{self.urls[1]} gave no answer that can be judged, as a baseline must")
        return texts

    def _judged(
        self, url: str, sampling: Sampling, samples: int, later: int = 0
    ) -> tuple[Asked, list[JudgedText]]:
        """The answers of a server, and the judgement of each. later: added to the seed of the
        requests, so that two servers draw with different numbers."""
        count = samples * len(self.prompts)
        self.say(f"asking {url} for {count} {'greedy' if sampling.greedy else 'sampled'} answers")
        asked = ask_texts(
            url,
            self.target,
            self.prompts,
            sampling,
            self.config,
            samples=samples,
            max_new_tokens=self.options.max_new_tokens,
            seed=self.options.seed + later,
            logprobs=sampling.greedy and self.config.protocol == "completions",
        )
        return asked, self._judge(asked, sampling)

    def _judge(self, asked: Asked, sampling: Sampling) -> list[JudgedText]:
        options = self.options
        dtype = DTYPES[options.engine_dtype] if options.engine_dtype else self.target.dtype
        judge = TextJudge(self.target, sampling, options.seed, dtype, options.rounding)
        self.say(f"judging {sum(len(text.tokens) for text in asked.texts)} tokens")
        return [judge.judge(text) for text in asked.texts]


def _contract(group: str, asked: Asked) -> Finding:
    """The finding about usage and ends of answers."""
    name, count = "ends and usage", len(asked.texts)
    if asked.faults:
        detail = f"{len(asked.faults)} faults in {count} answers; the first: {asked.faults[0]}"
        return Finding(group, name, Verdict.WRONG, detail)
    if asked.left_out:
        detail = f"{len(asked.left_out)} answers cannot be judged; the first: {asked.left_out[0]}"
        return Finding(group, name, Verdict.UNJUDGED, detail)
    return Finding(group, name, Verdict.EQUAL, f"{count} answers end as they say")
