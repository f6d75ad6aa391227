"""An audit from its beginning to its findings: what the command and Python programs share."""

import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Literal

from pydantic import ValidationError

from decode.base.device import dtype_name
from decode.base.errors import UserError
from decode.base.install_command import install_command
from decode.drafters import Drafter
from decode.model.loading import Target
from draftsmith.auditing.findings import Audit, Verdict, worst
from draftsmith.auditing.options import AuditOptions
from draftsmith.auditing.questions import Questions
from train.engines.server_config import ServerConfig


def audit(
    url: str,
    target: Target,
    prompts: Sequence[Sequence[int]],
    options: AuditOptions | None = None,
    *,
    baseline: str | None = None,
    drafter: Drafter | None = None,
    gamma: int = 4,
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

    url: `http://HOST:PORT`, without `/v1`. target: judges; load it in float32. prompts: token ids.
    options: sampling, number and length of the answers, exact short ones, level and rounding.
    baseline: the address of the same engine without drafts, for weights that are not the target's:
    its law is then the one to keep to, and the rounding of its greedy tokens is allowed. drafter,
    gamma: the one that the engine uses, and the tokens of its drafts: its acceptance must then be
    that of our own loop; None: acceptance is said, not judged. protocol: `completions` is
    `/v1/completions` with token ids, `llama-server` its own `/completion`. model: the server's name
    for the model; None: the first that it lists. key_env: the environment variable with the
    server's key. concurrency: requests at a time. timeout_seconds: for one answer. retries: after a
    broken connection or a status 408, 409, 429 or 5xx. say: called with what is done.
    Raises UserError for a server that cannot be asked, with the reason, and for bad arguments.
    """
    options = options or AuditOptions()
    if find_spec("httpx2") is None:
        raise UserError(f"an audit needs httpx2; run {install_command('serve')}")
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
    work = Questions(config.urls, target, prompts, options, config, say, drafter, gamma)
    findings = work.greedy()
    # A law of other weights says nothing.
    if worst(x.verdict for x in findings) is not Verdict.UNJUDGED:
        findings += work.contract()
        if not options.sampling.greedy:
            findings += [*work.sampled(), *work.exact()]
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
