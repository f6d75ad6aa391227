"""What comes with the texts: streams, stop strings, seeds, the tokenizer and the chat template.

Each question asks for a text twice, one request at a time. Two texts of other tokens say nothing
about it: whether the tokens are right is asked elsewhere.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx2

from decode.base.errors import UserError
from decode.draw.sampling import Sampling
from decode.model.loading import Target
from draftsmith.auditing.asking import AuditedServer, asking
from draftsmith.auditing.findings import Finding, Verdict
from draftsmith.auditing.tails import binomial_tail
from draftsmith.net.events import DONE, read_events
from train.data.chat_tokens import has_template
from train.engines.answers.protocols import AskSettings, LlamaServer, Row, token_ids
from train.settings.server_config import ServerConfig

GROUP = "contract"
PROMPTS, TOKENS = 6, 32  # of the texts that are asked for again
STOP_LENGTH = 2  # characters of a stop string
STOPS = 3  # stop strings of each text, at different places
# A law whose logits are rounded by an eighth in the mean gives another token for the same random
# number in about this share of draws.
MOVED = 0.25


@dataclass(frozen=True)
class Said:
    """A text as a server gives it. tokens: None if it gives none."""

    text: str
    tokens: list[int] | None
    finish_reason: str | None

    @classmethod
    def whole(cls, reply: dict[str, Any]) -> "Said":
        """From a reply, or an event of a stream, of either protocol. Raises as reading one of
        another shape does (`NO_ANSWER`)."""
        if "choices" not in reply:
            reason = LlamaServer.reasons.get(reply.get("stop_type") or "")
            return cls(str(reply["content"]), token_ids(reply.get("tokens")), reason)
        choice = reply["choices"][0]
        text, tokens = choice.get("text") or "", token_ids(choice.get("token_ids"))
        return cls(str(text), tokens, choice.get("finish_reason"))

    @classmethod
    def streamed(cls, body: bytes) -> "Said":
        """From the body of server-sent events."""
        events = [event.strip() for event in read_events(body)]
        text, reason = "", None
        tokens: list[int] = []
        for reply in (json.loads(event) for event in events if event != DONE):
            if reply.get("choices") == []:  # The last event of some servers counts tokens only.
                continue
            piece = cls.whole(reply)
            text += piece.text
            tokens += piece.tokens or []
            reason = piece.finish_reason or reason
        return cls(text, tokens or None, reason)

    def same_tokens(self, other: "Said") -> bool:
        return self.tokens is None or other.tokens is None or self.tokens == other.tokens


@dataclass
class _Compared:
    """faults: differences, in words. left_out: pairs of other tokens."""

    name: str
    count: int = 0
    left_out: int = 0
    faults: list[str] = field(default_factory=list)

    def finding(self, verdict: Verdict = Verdict.WRONG) -> list[Finding]:
        """One finding; none if nothing was compared. verdict: if there are faults."""
        if not self.count:
            return []
        detail = f"{len(self.faults)} of {self.count - self.left_out} are wrong"
        if self.left_out:
            detail += f"; {self.left_out} have other tokens the second time and are not counted"
        if self.faults:
            return [Finding(GROUP, self.name, verdict, f"{detail}; the first: {self.faults[0]}")]
        unjudged = self.left_out == self.count
        kept = Verdict.UNJUDGED if unjudged else Verdict.EQUAL
        return [Finding(GROUP, self.name, kept, detail, sees="one that differs")]


def contract_findings(
    url: str,
    target: Target,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    config: ServerConfig,
    *,
    max_new_tokens: int,
    seed: int,
    level: float,
    repeats: bool,
) -> list[Finding]:
    """The findings about the route that gives texts, and about the prompts of
    `/v1/chat/completions`. sampling: of the answers whose seed is given twice. level, repeats: see
    `_seeds`. Raises UserError as `ask_texts`."""
    findings: list[Finding] = []
    tokens = min(TOKENS, max_new_tokens)

    async def ask(server: AuditedServer) -> None:
        settings = AskSettings(
            Sampling(), tokens, seed, target.eos_token_ids, model=await server.named()
        )
        bodies = [
            server.protocol.body(Row(number, list(prompt)), settings)
            for number, prompt in enumerate(prompts[:PROMPTS])
        ]
        drawn = {"temperature": sampling.temperature}
        first = [await _answer(server, body) for body in bodies]
        bodies = [body for body, said in zip(bodies, first, strict=True) if said is not None]
        texts = [said for said in first if said is not None]
        if missing := len(first) - len(texts):
            detail = f"{missing} of {len(first)} replies are no answer, and are left out"
            findings.append(Finding(GROUP, "shape", Verdict.UNJUDGED, detail))
        findings.extend(_tokenizer(texts, target))
        findings.extend(await _streams(server, bodies, texts))
        findings.extend(await _stops(server, bodies, texts))
        if not sampling.greedy:
            drawing = [body | drawn for body in bodies]
            findings.append(await _seeds(server, drawing, level, repeats=repeats))
        findings.extend(await _template(server, target, prompts[0], settings))

    asking(url, config, target, ask)
    return findings


async def _answer(server: AuditedServer, body: dict[str, Any]) -> Said | None:
    """None: it has another shape. Raises UserError for a request that is refused."""
    response = server.accepted(await server.send("POST", server.protocol.path, body))
    with suppress(UserError):
        return server.decoded(response, Said.whole)
    return None


def _tokenizer(texts: Sequence[Said], target: Target) -> list[Finding]:
    """Is the text what the target's tokenizer makes of the tokens?"""
    compared = _Compared("tokenizer")
    for said in texts:
        if said.tokens is None:
            continue
        compared.count += 1
        expected = {
            _plain(target.tokenizer.decode(said.tokens, skip_special_tokens=skip))
            for skip in (True, False)
        }
        if _plain(said.text) not in expected:
            compared.faults.append(
                f"the server writes {said.text!r} for the tokens of {min(expected)!r}; it has "
                "another tokenizer than the target"
            )
    return compared.finding(Verdict.UNJUDGED)


def _plain(text: str) -> str:
    """Without what engines add, leave out or hold back at the ends of a text."""
    return text.strip().strip("\N{REPLACEMENT CHARACTER}").strip()


async def _streams(
    server: AuditedServer, bodies: Sequence[dict[str, Any]], texts: Sequence[Said]
) -> list[Finding]:
    compared = _Compared("streams")
    for body, whole in zip(bodies, texts, strict=True):
        response = await server.send("POST", server.protocol.path, body | {"stream": True})
        server.accepted(response)
        compared.count += 1
        try:
            said = server.understood(response, partial(Said.streamed, response.content))
        except UserError as error:
            compared.faults.append(str(error))
            continue
        if not said.same_tokens(whole):
            compared.left_out += 1
        elif (said.text, said.finish_reason) != (whole.text, whole.finish_reason):
            compared.faults.append(
                f"{said.text!r} ended with {said.finish_reason} as a stream, and {whole.text!r} "
                f"with {whole.finish_reason} as a whole"
            )
    return compared.finding()


async def _stops(
    server: AuditedServer, bodies: Sequence[dict[str, Any]], texts: Sequence[Said]
) -> list[Finding]:
    """Stop strings from the text itself, at places that fall on all places of a draft."""
    compared = _Compared("stop strings")
    for body, whole in zip(bodies, texts, strict=True):
        for part in range(STOPS):
            at = 1 + part * (len(whole.text) - STOP_LENGTH) // STOPS
            stop = whole.text[at : at + STOP_LENGTH]
            if len(stop) < STOP_LENGTH or whole.text.startswith(stop):
                continue
            expected = whole.text[: whole.text.index(stop)]
            said = await _answer(server, body | {"stop": [stop]})
            compared.count += 1
            if said is None:
                compared.faults.append(f"the answer for the stop string {stop!r} has another shape")
                continue
            if said.tokens is not None and whole.tokens is not None:
                common = min(len(said.tokens), len(whole.tokens)) - 1
                if said.tokens[:common] != whole.tokens[:common]:
                    compared.left_out += 1
                    continue
            if (said.text, said.finish_reason) != (expected, "stop"):
                compared.faults.append(
                    f"{said.text!r} ended with {said.finish_reason} for the stop string {stop!r} "
                    f"in {whole.text!r}"
                )
    return compared.finding()


async def _seeds(
    server: AuditedServer, bodies: Sequence[dict[str, Any]], level: float, *, repeats: bool
) -> Finding:
    """Are two answers to one request with one seed the same?

    repeats: whether the engine computes in 32 bits, which rounding moves too little. With 16, a
    prefix cache or another batch moves a law a little, so now and then another token is drawn from
    the same random number: at most in MOVED of the places where both texts are the same so far.
    Only more is wrong, at this level."""
    pairs = []
    # Of more pairs, because each may part once by rounding.
    others = [] if repeats else [body | {"seed": body["seed"] + len(bodies)} for body in bodies]
    for body in [*bodies, *others]:
        one, two = [await _answer(server, body) for _ in range(2)]
        if one is not None and two is not None:
            pairs.append((one, two))
    if not pairs:
        return Finding(GROUP, "seeds", Verdict.UNJUDGED, "no pair of answers can be read")
    differ = [(one, two) for one, two in pairs if (one.text, one.tokens) != (two.text, two.tokens)]
    detail = f"{len(differ)} of {len(pairs)} pairs differ"
    if not differ:
        return Finding(GROUP, "seeds", Verdict.EQUAL, detail, sees="one that differs")
    one, two = differ[0]
    detail += f"; the first: {one.text!r} and {two.text!r} came for one seed"
    if repeats:
        return Finding(GROUP, "seeds", Verdict.WRONG, detail)
    places = sum(_common(one, two) for one, two in pairs) + len(differ)
    p = binomial_tail(len(differ), places, MOVED)
    detail += f"; they part at {len(differ)} of {places} places where rounding may part them"
    verdict = Verdict.WRONG if p < level else Verdict.EQUAL
    sees = f"pairs that part at more than {MOVED:.0%} of such places"
    return Finding(GROUP, "seeds", verdict, detail, p, sees)


def _common(one: Said, two: Said) -> int:
    """The number of first tokens that two answers share; of characters, if they have no tokens."""
    pairs = zip(one.tokens or one.text, two.tokens or two.text, strict=False)
    common = 0
    for x, y in pairs:
        if x != y:
            break
        common += 1
    return common


async def _template(
    server: AuditedServer, target: Target, prompt: Sequence[int], settings: AskSettings
) -> list[Finding]:
    """None if the target has no template, or the server no such route."""
    if not has_template(target.tokenizer):
        return []
    messages = [{"role": "user", "content": target.tokenizer.decode(prompt).strip() or "?"}]
    expected = target.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    body = {"model": settings.model, "messages": messages, "max_tokens": 1, "temperature": 0}
    response = await server.send("POST", "/v1/chat/completions", body | {"return_token_ids": True})
    if response.status_code != httpx2.codes.OK:
        return []
    theirs, count = server.decoded(
        response,
        lambda reply: (
            reply.get("prompt_token_ids", reply["choices"][0].get("prompt_token_ids")),
            (reply.get("usage") or {}).get("prompt_tokens"),
        ),
    )
    compared = _Compared("chat template", 1)
    if (theirs is not None and theirs != expected) or (theirs is None and count != len(expected)):
        compared.faults.append(
            f"the server makes {count} tokens of a message, and the target's template "
            f"{len(expected)}: {target.tokenizer.decode(expected)!r}"
        )
    return compared.finding(Verdict.UNJUDGED)
