"""An audit from its beginning to its findings: what the command and Python programs share."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Literal

from pydantic import ValidationError

from decode.base.device import dtype_name
from decode.base.errors import UserError, require_whole
from decode.draw.sampling import Sampling
from decode.model.loading import DTYPES, Target
from draftsmith.auditing.asking import Asked, ask_texts
from draftsmith.auditing.beside import beside_findings
from draftsmith.auditing.findings import Audit, Finding, Verdict, worst
from draftsmith.auditing.greedy import greedy_findings
from draftsmith.auditing.sampled import sampled_findings
from draftsmith.auditing.texts import JudgedText, TextJudge
from train.engines.server_config import ServerConfig


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """What is asked, and how it is judged.

    sampling: of the sampled requests; greedy: none are made. samples: sampled answers to each
    prompt. seed: of the requests, and of the random numbers of the test. level: the probability
    that an engine without error is called wrong by any test. engine_dtype: what the engine computes
    in; None: the target's dtype. rounding: of logits, in place of what the dtype says.
    """

    sampling: Sampling = field(default_factory=lambda: Sampling(1.0))
    samples: int = 8
    max_new_tokens: int = 64
    seed: int = 0
    level: float = 1e-3
    engine_dtype: str | None = None
    rounding: float | None = None

    def __post_init__(self) -> None:
        require_whole(1, samples=self.samples, max_new_tokens=self.max_new_tokens)
        require_whole(0, seed=self.seed)
        if not 1e-12 <= self.level <= 0.1:
            raise UserError(f"level is {self.level!r}; expected a number from 1e-12 to 0.1")
        if self.engine_dtype is not None and self.engine_dtype not in DTYPES:
            raise UserError(f"engine_dtype is {self.engine_dtype!r}; expected {', '.join(DTYPES)}")
        if self.rounding is not None and not 0 <= self.rounding <= 100:
            raise UserError(f"rounding is {self.rounding!r}; expected a logit from 0 to 100")


def audit(
    url: str,
    target: Target,
    prompts: Sequence[Sequence[int]],
    options: AuditOptions | None = None,
    *,
    baseline: str | None = None,
    protocol: Literal["completions", "llama-server"] = "completions",
    model: str | None = None,
    key_env: str | None = None,
    concurrency: int = 8,
    timeout_seconds: float = 120.0,
    retries: int = 3,
    say: Callable[[str], None] = lambda text: None,
) -> Audit:
    """Judge a server's text by the target: greedy answers token by token, sampled ones by their
    law. Nothing is sent to another address than `url` and `baseline`.

    url: `http://HOST:PORT`, without `/v1`. prompts: token ids. baseline: the address of the same
    engine without drafts, for weights that are not the target's: its law is then the one to keep
    to, and the rounding of its greedy tokens is allowed. model: the server's name for the
    model; None: the first that it lists. key_env: the environment variable with the server's key.
    concurrency: requests at a time. timeout_seconds: for one answer. say: called with what is done.
    Raises UserError for a server that cannot be asked, with the reason, and for bad arguments.
    """
    options = options or AuditOptions()
    if find_spec("httpx2") is None:
        raise UserError("an audit needs httpx2; run pip install 'draftsmith[serve]'")
    try:
        config = ServerConfig(
            url=[url] if baseline is None else [url, baseline],
            protocol=protocol,
            model=model,
            key_env=key_env,
            concurrency=concurrency,
            timeout_seconds=timeout_seconds,
            retries=retries,
        )
    except ValidationError as error:
        raise UserError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None
    _require(target, prompts, options, config)
    begin = time.monotonic()
    work = _Work(config.urls, target, prompts, options, config, say)
    findings = work.greedy()
    # A law of other weights says nothing.
    if not options.sampling.greedy and worst(x.verdict for x in findings) is not Verdict.UNJUDGED:
        findings += work.sampled()
    subject = {
        "url": config.urls[0],
        "baseline": baseline,
        "target": target.name,
        "revision": target.revision,
        "target_dtype": dtype_name(target.dtype),
        "prompts": len(prompts),
        "sampling": options.sampling.numbers,
        **{key: value for key, value in vars(options).items() if key != "sampling"},
        "concurrency": concurrency,
        "seconds": round(time.monotonic() - begin, 1),
    }
    return Audit(subject, findings)


@dataclass(frozen=True)
class _Work:
    """urls: of the server, and of the baseline if there is one."""

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


def _require(
    target: Target, prompts: Sequence[Sequence[int]], options: AuditOptions, config: ServerConfig
) -> None:
    """Raise UserError for what is known before the server is asked."""
    config.key()
    if target.has_encoder:
        raise UserError(
            f"{target.name} has an encoder, which reads the prompts; an audit needs a target that "
            "continues its prompt"
        )
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise UserError("there are no prompts, or one is empty; expected token ids of each prompt")
    longest = max(map(len, prompts)) + options.max_new_tokens
    if longest > target.max_positions:
        raise UserError(
            f"the longest prompt and max_new_tokens are {longest} tokens, but {target.name} has "
            f"{target.max_positions} positions; shorten them"
        )
