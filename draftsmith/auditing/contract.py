"""What comes with the texts: streams, stop strings, seeds, the tokenizer and the chat template.

Each question asks for a text twice, one request at a time. Two texts of other tokens say nothing
about it: whether the tokens are right is asked elsewhere.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx2
from scipy.stats import binom

from decode.base.errors import UserError
from decode.draw.sampling import Sampling
from decode.model.loading import Target
from draftsmith.auditing.asking import AuditedServer
from draftsmith.auditing.asking import asking as ask_server
from draftsmith.auditing.findings import Finding, Judgement
from draftsmith.auditing.template_question import TemplateQuestion, prompt_of
from draftsmith.net.events import DONE, read_events
from train.engines.answers.protocols import AskSettings, LlamaServer, WantedAnswer, token_ids
from train.engines.ask_servers import ServerLost
from train.settings.server_config import ServerConfig

GROUP = "contract"
PROMPTS, TOKENS = 6, 32  # of the texts that are asked for again
STOP_LENGTH = 2  # characters of a stop string
STOPS = 3  # stop strings of each text, at different places
# A law whose logits are rounded by an eighth in the mean gives another token for the same random
# number in about this share of draws.
MOVED = 0.25

T = TypeVar("T")


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


@dataclass(frozen=True)
class _Asking:
    """Asks one server. settings: of its requests."""

    server: AuditedServer
    settings: AskSettings

    async def reply(
        self, body: dict[str, Any], read: Callable[[httpx2.Response], T], path: str | None = None
    ) -> "T | _NoReply":
        """What `read` makes of the answer. Raises ServerLost if the server answers no request."""
        try:
            response = await self.server.ask(self.server.protocol, body, self.settings, path)
            self.server.accepted(response)
        except ServerLost:
            raise
        except UserError as error:
            return _NoReply(str(error), came=False)
        try:
            return self.server.understood(response, lambda: read(response))
        except UserError as error:
            return _NoReply(str(error), came=True)

    async def said(self, body: dict[str, Any]) -> "Said | _NoReply":
        return await self.reply(body, lambda response: Said.whole(response.json()))


@dataclass(frozen=True)
class _NoReply:
    """came: an answer of another shape; else none came, or the request was refused."""

    problem: str
    came: bool


@dataclass
class _Compared:
    """faults: differences, in words. left_out: pairs of other tokens. missing: why others cannot be
    judged."""

    name: str
    count: int = 0
    left_out: int = 0
    faults: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def lacks(self, reply: _NoReply) -> None:
        """An answer of another shape is a fault; one that did not come says nothing."""
        (self.faults if reply.came else self.missing).append(reply.problem)

    def finding(self, verdict: Judgement = Judgement.WRONG) -> list[Finding]:
        """One finding; none if nothing was compared. verdict: if there are faults."""
        if not self.count:
            return []
        judged = self.count - self.left_out - len(self.missing)
        detail = f"{len(self.faults)} of {judged} are wrong"
        if self.left_out:
            detail += f"; {self.left_out} have other tokens the second time and are not counted"
        if self.missing:
            detail += f"; {_left_out(self.missing)}"
        if self.faults:
            return [Finding(GROUP, self.name, verdict, f"{detail}; the first: {self.faults[0]}")]
        kept = Judgement.EQUAL if judged else Judgement.UNJUDGED
        return [Finding(GROUP, self.name, kept, detail, sees="one that differs")]


def _left_out(missing: Sequence[str]) -> str:
    return f"{len(missing)} cannot be judged and are left out, the first: {missing[0]}"


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
    `_seeds`. What cannot be asked is a finding, beside those that were found before."""
    findings: list[Finding] = []
    tokens = min(TOKENS, max_new_tokens)

    async def ask(server: AuditedServer) -> None:
        settings = AskSettings(
            Sampling(), tokens, seed, target.eos_token_ids, model=await server.named()
        )
        asking = _Asking(server, settings)
        asked = [
            server.protocol.body(WantedAnswer(number, list(prompt)), settings)
            for number, prompt in enumerate(prompts[:PROMPTS])
        ]
        pairs = [(body, await asking.said(body)) for body in asked]
        whole = [(body, said) for body, said in pairs if isinstance(said, Said)]
        missing = [said.problem for _, said in pairs if isinstance(said, _NoReply)]
        if missing:
            verdict = Judgement.EQUAL if whole else Judgement.UNJUDGED
            findings.append(Finding(GROUP, "answers", verdict, _left_out(missing)))
        findings.extend(_tokenizer([said for _, said in whole], target))
        findings.extend(await _streams(asking, whole))
        findings.extend(await _stops(asking, whole))
        if not sampling.greedy:
            drawing = [body | {"temperature": sampling.temperature} for body, _ in whole]
            findings.append(await _seeds(asking, drawing, level, repeats=repeats))
        findings.extend(await _template(asking, target, prompts[0]))

    try:
        ask_server(url, config, target, ask)
    except UserError as error:  # what was found before stays
        findings.append(Finding(GROUP, "asked", Judgement.UNJUDGED, str(error)))
    return findings


def _tokenizer(texts: Sequence[Said], target: Target) -> list[Finding]:
    """Is the text what the target's tokenizer makes of the tokens?"""
    compared = _Compared("tokenizer")
    for said in texts:
        if said.tokens is None:
            continue
        compared.count += 1
        # Tokenizers raise errors of their own for other numbers.
        if others := [token for token in said.tokens if not 0 <= token < target.vocab_size]:
            compared.faults.append(
                f"the server gives the token id {others[0]}, but the target has ids from 0 to "
                f"{target.vocab_size - 1}"
            )
            continue
        expected = {
            _plain(target.tokenizer.decode(said.tokens, skip_special_tokens=skip))
            for skip in (True, False)
        }
        if _plain(said.text) not in expected:
            compared.faults.append(
                f"the server writes {said.text!r} for the tokens of {min(expected)!r}; it has "
                "another tokenizer than the target"
            )
    return compared.finding(Judgement.UNJUDGED)


def _plain(text: str) -> str:
    """Without what engines add, leave out or hold back at the ends of a text."""
    return text.strip().strip("\N{REPLACEMENT CHARACTER}").strip()


async def _streams(asking: _Asking, whole: Sequence[tuple[dict[str, Any], Said]]) -> list[Finding]:
    compared = _Compared("streams")
    for body, expected in whole:
        said = await asking.reply(
            body | {"stream": True}, lambda response: Said.streamed(response.content)
        )
        compared.count += 1
        if isinstance(said, _NoReply):
            compared.lacks(said)
        elif not said.same_tokens(expected):
            compared.left_out += 1
        elif (said.text, said.finish_reason) != (expected.text, expected.finish_reason):
            compared.faults.append(
                f"{said.text!r} ended with {said.finish_reason} as a stream, and "
                f"{expected.text!r} with {expected.finish_reason} as a whole"
            )
    return compared.finding()


async def _stops(asking: _Asking, whole: Sequence[tuple[dict[str, Any], Said]]) -> list[Finding]:
    """Stop strings from the text itself, at places that fall on all places of a draft."""
    compared = _Compared("stop strings")
    for body, full in whole:
        for part in range(STOPS):
            at = 1 + part * (len(full.text) - STOP_LENGTH) // STOPS
            stop = full.text[at : at + STOP_LENGTH]
            if len(stop) < STOP_LENGTH or full.text.startswith(stop):
                continue
            expected = full.text[: full.text.index(stop)]
            said = await asking.said(body | {"stop": [stop]})
            compared.count += 1
            if isinstance(said, _NoReply):
                compared.lacks(said)
                continue
            if said.tokens is not None and full.tokens is not None:
                common = min(len(said.tokens), len(full.tokens)) - 1
                if said.tokens[:common] != full.tokens[:common]:
                    compared.left_out += 1
                    continue
            if (said.text, said.finish_reason) != (expected, "stop"):
                compared.faults.append(
                    f"{said.text!r} ended with {said.finish_reason} for the stop string {stop!r} "
                    f"in {full.text!r}"
                )
    return compared.finding()


async def _seeds(
    asking: _Asking, bodies: Sequence[dict[str, Any]], level: float, *, repeats: bool
) -> Finding:
    """Are two answers to one request with one seed the same?

    repeats: whether the engine computes in 32 bits, which rounding moves too little. With 16, a
    prefix cache or another batch moves a law a little, so now and then another token is drawn from
    the same random number: at most in MOVED of the places where both texts are the same so far.
    Only more is wrong, at this level."""
    pairs: list[tuple[Said, Said]] = []
    missing: list[str] = []
    # Of more pairs, because each may part once by rounding.
    others = [] if repeats else [body | {"seed": body["seed"] + len(bodies)} for body in bodies]
    for body in [*bodies, *others]:
        one, two = [await asking.said(body) for _ in range(2)]
        if isinstance(one, Said) and isinstance(two, Said):
            pairs.append((one, two))
        missing += [said.problem for said in (one, two) if isinstance(said, _NoReply)]
    unread = f"; {_left_out(missing)}" if missing else ""
    if not pairs:
        detail = f"no pair of answers can be read{unread}"
        return Finding(GROUP, "seeds", Judgement.UNJUDGED, detail)
    differ = [(one, two) for one, two in pairs if (one.text, one.tokens) != (two.text, two.tokens)]
    detail = f"{len(differ)} of {len(pairs)} pairs differ{unread}"
    if not differ:
        return Finding(GROUP, "seeds", Judgement.EQUAL, detail, sees="one that differs")
    one, two = differ[0]
    detail += f"; the first: {one.text!r} and {two.text!r} came for one seed"
    if repeats:
        return Finding(GROUP, "seeds", Judgement.WRONG, detail)
    places = sum(_common(one, two) for one, two in pairs) + len(differ)
    p = float(binom.sf(len(differ) - 1, places, MOVED))
    detail += f"; they part at {len(differ)} of {places} places where rounding may part them"
    verdict = Judgement.WRONG if p < level else Judgement.EQUAL
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


async def _template(asking: _Asking, target: Target, prompt: Sequence[int]) -> list[Finding]:
    """None if the target has no template, or the server no such route."""
    question = TemplateQuestion.of(target, prompt, asking.settings.model)
    if question is None:
        return []
    counted = await asking.reply(question.body, _prompt_of, "/v1/chat/completions")
    if isinstance(counted, _NoReply):
        return (
            [Finding(GROUP, "chat template", Judgement.UNJUDGED, counted.problem)]
            if counted.came
            else []
        )
    compared = _Compared("chat template", 1)
    if fault := question.fault(*counted):
        compared.faults.append(fault)
    return compared.finding(Judgement.UNJUDGED)


def _prompt_of(response: httpx2.Response) -> tuple[list[int] | None, int | None]:
    return prompt_of(response.json())
