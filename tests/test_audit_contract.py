"""What comes with the texts of an audited server, by servers with one fault each; its drafts."""

import copy
import dataclasses
import json
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

import draftsmith
from decode.drafters.small_lm import SmallLMDrafter
from decode.draw.sampling import Sampling
from decode.model.loading import Target
from decode.settings import DecodeSettings
from draftsmith import AuditOptions
from draftsmith.auditing.contract import contract_findings
from draftsmith.auditing.findings import Finding, Judgement
from draftsmith.export.compare_acceptance import Counting, OwnLoop, count_drafts
from tests.audit_controls import PROMPTS
from tests.mutants import StaleCache
from tests.service import serving
from tests.tiny import tiny_target
from tests.upstream import served
from train.settings.server_config import ServerConfig

TARGET = tiny_target()
# Ids that no tokenizer has.
ODD_IDS = {"tokenizer: an id below 0": -1, "tokenizer: a large id": 10**30}
HALF, STOP = "\ud800", 2  # half a character, where a stop string is taken from
LETTERS = sorted(set(TARGET.tokenizer("she sells sea shells by the shore")["input_ids"]))


class Letters:
    """Answers letters that depend on the prompt and the seed. fault: what it does wrong. never:
    which requests get a status 5xx, or another."""

    def __init__(
        self,
        fault: str = "",
        never: Callable[[dict[str, Any]], bool] = lambda body: False,
        status: int = 500,
    ) -> None:
        self.fault, self.never, self.status = fault, never, status

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", lambda _: JSONResponse({"data": [{"id": "letters"}]})),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/completion", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
            ]
        )

    async def completions(self, request: Request) -> Response:
        body = await request.json()
        if self.never(body):
            return Response("it failed", self.status)
        seed = body["seed"] if body["temperature"] else 0
        if self.fault == "seeds" and seed:
            seed = random.getrandbits(30)
        rng = np.random.default_rng([seed, *body["prompt"]])
        of_llama = "n_predict" in body
        tokens = rng.choice(LETTERS, body["n_predict" if of_llama else "max_tokens"]).tolist()
        text, reason = TARGET.tokenizer.decode(tokens), "length"
        if self.fault == "tokenizer":
            text = text.upper()
        if self.fault == "half a character" and len(text) > STOP:
            text = text[:STOP] + HALF + text[STOP + 1 :]
        if self.fault in ODD_IDS:
            tokens[-1] = ODD_IDS[self.fault]
        for stop in body.get("stop", ()):
            if self.fault != "stop strings":
                text, reason = text[: text.index(stop)], "stop"

        def said(text: str, tokens: list[int], reason: str | None) -> dict[str, Any]:
            if of_llama:
                kinds = {"stop": "word", "length": "limit", None: "none"}
                return {"content": text, "tokens": tokens, "stop_type": kinds[reason]}
            choice = {"text": text, "token_ids": tokens, "finish_reason": reason}
            return {"choices": [choice]}

        if not body["stream"]:
            # JSON can hold half a surrogate pair; Starlette's responses cannot.
            return Response(json.dumps(said(text, tokens, reason)), media_type="application/json")
        half = len(text) // 2
        # The last piece of a text is lost.
        last = "" if self.fault == "streams" else text[half:]
        parts = [said(text[:half], tokens, None), said(last, [], reason)]
        end = [] if of_llama else ["data: [DONE]\n\n"]
        return PlainTextResponse("".join([f"data: {json.dumps(x)}\n\n" for x in parts] + end))

    async def chat(self, request: Request) -> Response:
        messages: Any = (await request.json())["messages"]
        if self.fault == "chat template":
            messages = [{"role": "system", "content": "Be brief."}, *messages]
        ids = TARGET.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return JSONResponse({"choices": [{}], "usage": {"prompt_tokens": len(ids)}})


def found_in(
    letters: Letters, protocol: Any = "completions", target: Target = TARGET
) -> list[Finding]:
    with served(letters.app()) as url:
        return contract_findings(
            url, target, PROMPTS, Sampling(1.0),
            ServerConfig(url=url, protocol=protocol, retries=0),
            max_new_tokens=24, seed=1, level=1e-4, repeats=True,
        )  # fmt: skip


FAULTS = ["tokenizer", "streams", "stop strings", "seeds", "chat template"]


@pytest.mark.parametrize(
    ("fault", "protocol"),
    [
        *((fault, "completions") for fault in ["", *FAULTS, *ODD_IDS]),
        ("", "llama-server"),
        ("streams", "llama-server"),
    ],
)
def test_each_fault_of_the_contract_is_named(fault: str, protocol: Any) -> None:
    findings = found_in(Letters(fault), protocol)
    assert len(findings) == 5
    named = {fault.partition(":")[0]} - {""}
    assert {x.name for x in findings if x.verdict is not Judgement.EQUAL} == named


def poison(body: dict[str, Any]) -> bool:
    return bool(body["prompt"] == PROMPTS[1])


@pytest.mark.parametrize(
    ("never", "unjudged", "said", "status"),
    [
        (poison, set(), {"answers": 1}, 500),
        (poison, set(), {"answers": 1}, 400),
        (lambda body: poison(body) and "stop" in body, set(), {"stop strings": 3}, 400),
        (lambda body: poison(body) and body["stream"], set(), {"streams": 1}, 500),
        (lambda body: body["stream"], {"streams"}, {"streams": 6}, 400),
        (lambda body: bool(body["temperature"]), {"seeds"}, {"seeds": 12}, 500),
    ],
)
def test_what_is_never_answered_costs_its_own_comparison_only(
    never: Any, unjudged: set[str], said: dict[str, int], status: int
) -> None:
    findings = found_in(Letters("", never, status))
    assert {"tokenizer", "streams", "stop strings", "seeds"} <= {x.name for x in findings}
    assert {x.name for x in findings if x.verdict is not Judgement.EQUAL} == unjudged
    lost = {x.name: re.findall(r"(\d+) cannot be judged and are left", x.detail) for x in findings}
    assert {name: int(count[0]) for name, count in lost.items() if count} == said


def test_what_was_compared_before_a_server_is_lost_is_kept() -> None:
    lost: list[bool] = []

    def never(body: dict[str, Any]) -> bool:
        lost.extend([True] * ("stop" in body))
        return bool(lost)

    findings = found_in(Letters("streams", never))
    verdicts = {x.name: x.verdict for x in findings}
    assert verdicts["streams"] is Judgement.WRONG
    assert verdicts["asked"] is Judgement.UNJUDGED


def test_half_a_character_costs_its_own_comparisons_only() -> None:
    """No request can have such a stop string."""
    named = {x.name: x for x in found_in(Letters("half a character"))}
    assert set(named) == {"tokenizer", "streams", "stop strings", "seeds", "chat template"}
    assert "cannot be written" in named["stop strings"].detail
    assert named["streams"].verdict is named["seeds"].verdict is Judgement.EQUAL


@pytest.mark.parametrize("template", ["{{ raise_exception('no users') }}", "{{ 1 / 0 }}"])
def test_a_template_that_refuses_a_message_costs_its_own_question_only(template: str) -> None:
    tokenizer = copy.deepcopy(TARGET.tokenizer)
    tokenizer.chat_template = template
    findings = found_in(Letters(), target=dataclasses.replace(TARGET, tokenizer=tokenizer))
    assert [x.name for x in findings if x.verdict is not Judgement.EQUAL] == ["asked"]
    assert "the chat template refuses these messages" in findings[-1].detail


def test_draft_tokens_are_counted_as_the_engine_picks_them() -> None:
    """The drafter is the target: what it draws is always accepted, what it chooses is not."""
    own = OwnLoop(TARGET, SmallLMDrafter(TARGET.model), PROMPTS, 3, 24)
    for chooses, lowest, highest in ((False, 1.0, 1.0), (True, 0.0, 0.95)):
        counting = Counting(chooses=chooses)
        drafted, accepted = count_drafts(own, counting, Sampling(2.0))
        assert drafted > 100
        assert lowest <= accepted / drafted <= highest


@pytest.mark.parametrize(("kind", "right"), [(SmallLMDrafter, True), (StaleCache, False)])
def test_acceptance_is_that_of_our_own_loop(kind: type[SmallLMDrafter], right: bool) -> None:
    """The drafter is the target itself, so an error of its own shows in no text."""
    options = AuditOptions(sampling=Sampling(), max_new_tokens=24)
    with serving(TARGET, kind(TARGET.model), DecodeSettings(gamma=3), max_rows=8) as running:
        own = SmallLMDrafter(TARGET.model)
        found = draftsmith.audit(running.url, TARGET, PROMPTS, options, drafter=own, gamma=3)
    acceptance = next(x for x in found.findings if x.group == "drafts")
    assert acceptance.verdict is (Judgement.EQUAL if right else Judgement.WRONG), acceptance
    others = {x.verdict for x in found.findings if x is not acceptance}
    assert others == {Judgement.EQUAL}, found
