"""What comes with the texts of an audited server, by servers with one fault each; its drafts."""

import json
import random
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
from decode.settings import DecodeSettings
from draftsmith import AuditOptions
from draftsmith.auditing.contract import contract_findings
from draftsmith.auditing.findings import Verdict
from draftsmith.export.engines import Counting
from draftsmith.export.verify_export import OwnLoop, count_drafts
from tests.audit_controls import PROMPTS
from tests.mutants import StaleCache
from tests.service import serving
from tests.tiny import tiny_target
from tests.upstream import served
from train.settings.server_config import ServerConfig

TARGET = tiny_target()
LETTERS = sorted(set(TARGET.tokenizer("she sells sea shells by the shore")["input_ids"]))


class Letters:
    """Answers letters that depend on the prompt and the seed. fault: what it does wrong."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

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
        seed = body["seed"] if body["temperature"] else 0
        if self.fault == "seeds" and seed:
            seed = random.getrandbits(30)
        rng = np.random.default_rng([seed, *body["prompt"]])
        of_llama = "n_predict" in body
        tokens = rng.choice(LETTERS, body["n_predict" if of_llama else "max_tokens"]).tolist()
        text, reason = TARGET.tokenizer.decode(tokens), "length"
        if self.fault == "tokenizer":
            text = text.upper()
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
            return JSONResponse(said(text, tokens, reason))
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


FAULTS = ["tokenizer", "streams", "stop strings", "seeds", "chat template"]


@pytest.mark.parametrize(
    ("fault", "protocol"),
    [
        *((fault, "completions") for fault in ["", *FAULTS]),
        ("", "llama-server"),
        ("streams", "llama-server"),
    ],
)
def test_each_fault_of_the_contract_is_named(fault: str, protocol: Any) -> None:
    with served(Letters(fault).app()) as url:
        config = ServerConfig(url=url, protocol=protocol)
        findings = contract_findings(
            url,
            TARGET,
            PROMPTS,
            Sampling(1.0),
            config,
            max_new_tokens=24,
            seed=1,
            level=1e-4,
            repeats=True,
        )
    assert len(findings) == 5
    assert {x.name for x in findings if x.verdict is not Verdict.EQUAL} == {fault} - {""}


def test_draft_tokens_are_counted_as_the_engine_picks_them() -> None:
    """The drafter is the target: what it draws is always accepted, what it chooses is not."""
    own = OwnLoop(TARGET, SmallLMDrafter(TARGET.model), PROMPTS, 3, 24)
    for chooses, lowest, highest in ((False, 1.0, 1.0), (True, 0.0, 0.95)):
        counting = Counting(chooses=chooses)
        drafted, accepted = count_drafts(own, own.drafter, counting, Sampling(2.0))
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
    assert acceptance.verdict is (Verdict.EQUAL if right else Verdict.WRONG), acceptance
    others = {x.verdict for x in found.findings if x is not acceptance}
    assert others == {Verdict.EQUAL}, found
