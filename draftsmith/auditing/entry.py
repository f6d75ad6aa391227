"""An audit from its beginning to its findings: what the command and Python programs share."""

import re
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, Literal

from pydantic import ValidationError

from decode.base.device import dtype_name
from decode.base.errors import UserError
from decode.base.install_command import install_command
from decode.drafters import Drafter
from decode.model.loading import Target
from draftsmith.auditing.audit_options import AuditOptions
from draftsmith.auditing.findings import Audit, Finding, Judgement
from draftsmith.auditing.questions import Questions
from draftsmith.export.trained_drafter import public_name
from train.settings.server_config import ServerConfig


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

    url: `http://HOST:PORT`, with or without `/v1`. target: judges; load it in float32. prompts:
    token ids. options: sampling, number and length of the answers, exact short ones, level and
    rounding.
    baseline: the address of the same engine without drafts, for weights that are not the target's:
    its law is then the one to keep to, and the rounding of its greedy tokens is allowed; answers
    that it does not give cost their comparisons only. drafter, gamma: the one that the engine uses,
    and the tokens of its drafts: its acceptance must then be that of our own loop; None: acceptance
    is said, not judged. protocol: `completions` is `/v1/completions` with token ids, `llama-server`
    its own `/completion`. model: the server's name for the model; None: the first that it lists.
    key_env: the environment variable with the server's key. concurrency: requests at a time.
    timeout_seconds: for one answer. retries: after a broken connection or a status 408, 409, 429 or
    5xx. say: called with what is done.
    Raises UserError for a server that cannot be asked, with the reason, and for bad arguments.
    """
    options = options or AuditOptions()
    if find_spec("httpx2") is None:
        raise UserError(f"an audit needs httpx2; run {install_command('serve')}")
    config = server_config(
        [address for address in (url, baseline) if address is not None],
        protocol=protocol,
        model=model,
        key_env=key_env,
        concurrency=concurrency,
        timeout_seconds=timeout_seconds,
        retries=retries,
    )
    _require(target, prompts, options, config)
    work = Questions(config.urls, target, prompts, options, config, say, drafter, gamma)
    work.require()
    begin = time.monotonic()
    findings = work.greedy()
    # A law of other weights says nothing, and neither does one without texts.
    unjudged = {x.name for x in findings if x.verdict is Judgement.UNJUDGED}
    if not unjudged & {"weights", "ends and usage"}:
        parts = [work.contract]
        if not options.sampling.greedy:
            parts += [work.sampled, work.exact]
        for part in parts:
            findings += _asked(part)
    subject = {
        "url": config.urls[0],
        "baseline": config.urls[1] if baseline is not None else None,
        "target": public_name(target.name),
        "revision": target.revision,
        "target_dtype": dtype_name(target.dtype),
        "prompts": len(prompts),
        "sampling": options.sampling.numbers,
        **{key: value for key, value in vars(options).items() if key != "sampling"},
        "concurrency": concurrency,
        "seconds": round(time.monotonic() - begin, 1),
    }
    return Audit(subject, findings)


def server_root(url: str) -> str:
    """The address of a server; many documents give it with the path of its API."""
    return re.sub(r"/+(v1/*)?$", "", url)


def _asked(part: Callable[[], list[Finding]]) -> list[Finding]:
    """The findings of a part; if it cannot be asked, that, so that no other part is lost."""
    try:
        return part()
    except UserError as error:
        return [Finding(part.__name__, "asked", Judgement.UNJUDGED, str(error))]


def server_config(addresses: Sequence[str], **settings: Any) -> ServerConfig:
    """How the servers at these addresses are asked. Raises UserError for bad values."""
    try:
        return ServerConfig(url=[server_root(address) for address in addresses], **settings)
    except ValidationError as error:
        raise UserError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None


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
    if unknown := {x for prompt in prompts for x in prompt if not 0 <= x < target.token_count}:
        raise UserError(
            f"a prompt has the token id {min(unknown)}, but {target.name} has {target.token_count} "
            "tokens; give prompts of its own tokenizer"
        )
    tokens = max(options.max_new_tokens, options.exact_tokens if options.exact else 0)
    longest = max(map(len, prompts)) + tokens
    if longest > target.max_positions:
        raise UserError(
            f"the longest prompt and its answer are {longest} tokens, but {target.name} has "
            f"{target.max_positions} positions; shorten them"
        )
