"""Settings of a service that change while texts run: nothing changes by half, exact texts stay, and
what is lossy is said."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from decode.base.errors import UserError
from decode.draft import Contexts, Draft
from decode.drafters import NoDrafter
from decode.drafters.lookup.ngram import NgramDrafter
from decode.drafters.several.combined import CompositeDrafter
from decode.drafters.several.routed import RoutedDrafter
from decode.loop.decoding import Decoder
from decode.opening.directory import open_drafter
from decode.rules import RULES
from decode.rules.speculative import SpeculativeSampling
from distill.adapter_directory import save_adapter
from distill.student_settings import DrafterLora
from distill.trainable_model import Trainable
from draftsmith.serve import live_settings
from draftsmith.serve.dynamic_lenience import BEGINS, ENDS, SECONDS, DynamicLenience
from tests.service import (
    CHAT,
    LONG,
    MODEL,
    QUESTION,
    SAMPLED,
    Held,
    Running,
    alone,
    ask,
    asked,
    begin,
    chat,
    events,
    save_small,
    serving,
    set_to,
    target,
    text_in,
    text_of,
    until,
    words,
)


def test_the_label_of_a_request_chooses_its_drafter() -> None:
    seen: list[int] = []

    class Noted(RoutedDrafter):
        def routes_of(self, contexts: Contexts) -> np.ndarray:
            routes = super().routes_of(contexts)
            seen.extend(routes.tolist())
            return routes

    router = Noted([NgramDrafter(), NgramDrafter()], ["en", "de"])
    with serving(target(), router) as running, running.client() as client:
        for options in ({"label": "de"}, {}, {"label": "de"}):
            assert ask(client, max_tokens=4, draftsmith=options).status_code == 200
        assert ask(client, draftsmith={"label": "x" * 65}).status_code == 400
    assert seen == [1, 0, 1]


def test_a_service_has_the_turn_of_its_drafters_while_texts_run() -> None:
    """Also of those in a combination, which another decoder may have alone, and after a change."""
    inside: list[bool] = []

    class Watched(NgramDrafter):
        def draft(self, *arguments: Any) -> Draft:
            inside.append(all(x.entered_here for x in self.turn.each))
            return super().draft(*arguments)

    first, second = Watched(), Watched()
    with serving(target(), RoutedDrafter([first, NoDrafter()], ["", "de"])) as running:
        batcher = running.batcher
        with running.client() as client:
            answer = begin(client, max_tokens=LONG)
            both = CompositeDrafter([second, first])
            batcher.between(lambda decoding: decoding.set(drafter=both)).result()
            answer.close()
            assert ask(client, max_tokens=4).status_code == 200
        assert inside
        assert all(inside)
        # Without texts it waits, and others may decode.
        decoder = Decoder(target().model, first)
        assert decoder.decode([[5, 6, 7]], 4).outputs[0]


def save_adapter_of(base: Path, directory: Path) -> None:
    """An adapter that makes another drafter of a small model."""
    model = AutoModelForCausalLM.from_pretrained(base)
    trained = Trainable(model, lora=DrafterLora(r=2, merge=False))
    weights = {name: x + 0.1 * ("lora_B" in name) for name, x in trained.weights().items()}
    save_adapter(directory, trained, weights, base, target=target(), provenance={})


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft's affair
def test_adapters_are_loaded_and_dropped_while_texts_run(endless: Any, tmp_path: Path) -> None:
    """The text is the target's with each of them, and in a text whose adapter is dropped."""
    base, label = save_small(tmp_path / "base"), {"label": "de"}
    for name in ("de", "fr"):
        save_adapter_of(base, tmp_path / "adapters" / name)
    opened: Any = open_drafter(str(base), endless)
    options = {"adapters": tmp_path / "adapters"}
    expected = words(alone(endless, asked(QUESTION), LONG))

    def call(what: str, **body: str) -> Any:
        return client.post(f"/v1/{what}_lora_adapter", json=body)

    def text_with(**fields: str) -> str:
        answer = ask(client, max_tokens=LONG, ignore_eos=True, draftsmith=fields)
        return text_of(answer)

    with serving(endless, opened, options=options) as running, running.client() as client:
        assert text_with(**label) == expected  # nobody has this label yet
        assert running.batcher.decoder.drafter is opened
        for name in ("de", "fr"):
            answer = call("load", lora_name=name, lora_path=name)
            assert answer.status_code == 200, answer.text
        assert client.get("/admin/settings").json()["adapters"] == ["de", "fr"]
        router: Any = running.batcher.decoder.drafter
        own = {id(x) for x in opened.lm.model.parameters()}
        for drafter in router.drafters:
            assert own <= {id(x) for x in drafter.lm.model.parameters()}
        again = call("load", lora_name="de", lora_path="fr")
        assert (again.status_code, "has already been loaded" in again.text) == (400, True)
        for path in ("../base", str(base), "none"):
            assert call("load", lora_name="x", lora_path=path).status_code == 400
        assert call("unload", lora_name="x").status_code == 404

        held = Held(running)
        response = begin(client, draftsmith=label)
        held.waits.wait(60)
        assert router.routes.tolist() == [1]
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(call, "unload", lora_name="de")
            until(lambda: len(running.batcher._changes) == 1)
            held.release()
            assert answer.result().json() == {"success": True, "adapters": ["fr"]}
        assert text_in(events(response.iter_lines())[:-1]) == expected
        # Another drafter for the rows without an adapter.
        assert set_to(client, drafter="none").json()["adapters"] == ["fr"]
        assert text_with(label="fr") == expected
        assert call("unload", lora_name="fr").status_code == 200
        assert isinstance(running.batcher.decoder.drafter, NoDrafter)
    with serving(target(), api_key="key") as running, running.client() as client:
        assert call("unload", lora_name="x").status_code == 401
        client.headers["authorization"] = "Bearer key"
        assert call("unload", lora_name="x").status_code == 404


def test_drafter_rule_and_policy_change_while_a_text_runs(
    endless: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_small(tmp_path / "drafters" / "small")
    opened = []
    original: Callable[..., Any] = live_settings.open_drafter

    def open_drafter(*args: Any) -> Any:
        opened.append(threading.current_thread().name)
        return original(*args)

    monkeypatch.setattr(live_settings, "open_drafter", open_drafter)
    changes: list[dict[str, Any]] = [
        {"drafter": "small", "gamma": 2},
        {"rule": "block"},
        {"drafter": "ngram:max_n=2+small", "rule": "exact", "policy": "heuristic:first=1"},
        {"drafter": "none"},
        {"drafter": "ngram", "rule": "speculative", "gamma": 5, "policy": "fixed"},
    ]
    with serving(endless, options={"drafters": tmp_path / "drafters"}) as running:
        expected = words(alone(endless, asked(QUESTION), LONG))
        with running.client() as client:
            for change in changes:
                held = Held(running)
                response = begin(client)
                before = client.get("/admin/settings").json()
                with ThreadPoolExecutor() as pool:
                    answer = pool.submit(set_to, client, **change)
                    until(lambda: len(running.batcher._changes) == 1)
                    assert client.get("/admin/settings").json() == before
                    held.release()
                    now = answer.result().json()
                assert {key: now[key] for key in change} == change
                assert text_in(events(response.iter_lines())[:-1]) == expected
            assert opened
            assert "decode" not in opened


def test_a_drafter_is_loaded_only_from_below_its_directory(endless: Any, tmp_path: Path) -> None:
    save_small(tmp_path / "outside")
    inside = tmp_path / "drafters"
    save_small(inside / "small")
    (inside / "link").symlink_to(tmp_path / "outside")
    with serving(endless) as running, running.client() as client:
        answer = set_to(client, drafter=str(inside / "small"))
        assert answer.status_code == 400
        assert "without --drafters DIR" in answer.json()["error"]["message"]
    with serving(endless, options={"drafters": inside}) as running, running.client() as client:
        before = client.get("/admin/settings").json()
        for name, problem in (
            ("../outside", "not below the directory"),
            (str(tmp_path / "outside"), "not below the directory"),
            ("link", "not below the directory"),
            ("ngram+../outside", "not below the directory"),
            ("ngram++../outside", "not below the directory"),
            ("small++../outside", "not below the directory"),
            (f"{tmp_path / 'outside'}+ngram", "not below the directory"),
            ("nothing", "no drafter directory 'nothing'"),
            ("small_lm", "trained drafter"),
            ("ngram+skip:file=layers.json", "a request cannot name one"),
            ("some/hub-id", "no drafter directory 'some/hub-id'"),
        ):
            answer = set_to(client, drafter=name, gamma=9)
            assert answer.status_code == 400, name
            assert problem in answer.json()["error"]["message"]
        assert set_to(client, drafter="small+ngram").json()["drafter"] == "small+ngram"
        assert set_to(client, drafter=before["drafter"]).json()["drafter"] == before["drafter"]
        (inside / "small" / "model.safetensors").write_bytes(b"")
        assert set_to(client, drafter="small", gamma=9).status_code == 400
        assert client.get("/admin/settings").json() == before


def test_a_lossy_rule_is_said_everywhere_and_only_while_it_may_change_a_text() -> None:
    body = chat(QUESTION, max_tokens=12, seed=3)
    with serving(target(), settings=SAMPLED) as running, running.client() as client:

        def answers() -> tuple[Any, Any]:
            streamed = client.post(CHAT, json=body | {"stream": True})
            return client.post(CHAT, json=body), streamed

        exact, _ = answers()
        assert "x-draftsmith-lossy" not in exact.headers
        assert exact.json()["draftsmith"]["lossy"] is None
        for change, name in (
            ({"lenience": 0.25}, "lenience:lenience=0.25"),
            ({"rule": "threshold:threshold=0.4"}, "threshold:threshold=0.4"),
        ):
            assert set_to(client, **change).json()["lossy"] == name
            assert client.get("/health").json() == {"status": "ok", "lossy": name}
            whole, streamed = answers()
            for answer in (whole, streamed):
                assert answer.headers["x-draftsmith-lossy"] == name
            assert whole.json()["draftsmith"]["lossy"] == name
            assert whole.json()["system_fingerprint"] != exact.json()["system_fingerprint"]
        set_to(client, lenience=0.25)
        assert running.metrics()["draftsmith:lenience"] == 0.25
        greedy = client.post(CHAT, json=body | {"temperature": 0})
        assert "x-draftsmith-lossy" not in greedy.headers
        assert text_of(greedy) == words(alone(target(), asked(QUESTION), 12))
        set_to(client, lenience=1)
        again, _ = answers()
        assert "x-draftsmith-lossy" not in again.headers
        assert text_of(again) == text_of(exact)
        assert again.json()["system_fingerprint"] == exact.json()["system_fingerprint"]


def test_a_text_that_was_lossy_in_between_says_so(endless: Any) -> None:
    with serving(endless, settings=SAMPLED) as running, running.client() as client:
        response = begin(client)  # its headers come with its first text
        held = Held(running)
        assert held.waits.wait(60)
        assert "x-draftsmith-lossy" not in response.headers
        with ThreadPoolExecutor() as pool:
            change = pool.submit(set_to, client, lenience=0.5)
            until(lambda: len(running.batcher._changes) == 1)
            held.release()
            change.result()
        chunks = events(response.iter_lines())[:-1]
        assert chunks[-1]["draftsmith"]["lossy"] == "lenience:lenience=0.5"


def test_settings_that_cannot_be_change_nothing(service: Running) -> None:
    with service.client() as client:
        before = client.get("/admin/settings").json()
        for wrong in (
            {"gamma": 0},
            {"gamma": 600},
            {"policy": "nothing"},
            {"gamma": 2, "policy": "heuristic:first=3"},
            {"lenience": 0},
            {"lenience": 0.5, "rule": "speculative"},
            {"rule": "nothing"},
            {"drafter": "nothing"},
            {"learning": True},
            {"dynamic_lenience": 0.5, "rule": "block"},
        ):
            assert set_to(client, **wrong).status_code == 400, wrong
        assert client.get("/admin/settings").json() == before


# --- dynamic lenience -----------------------------------------------------------------------------


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def steady(controller: DynamicLenience, clock: Clock, waiting: int) -> float:
    """l after this many texts have waited for long."""
    for _ in range(100):
        clock.seconds += SECONDS / 5
        controller(waiting)
    return controller.rule.lenience


def test_lenience_falls_in_a_spike_and_comes_back_without_flutter() -> None:
    clock = Clock()
    controller = DynamicLenience(SpeculativeSampling(), 0.5, 10, clock)
    assert steady(controller, clock, 0) == 1
    assert steady(controller, clock, int(10 * BEGINS) - 1) == 1  # load, but no spike
    assert steady(controller, clock, 20) == pytest.approx(0.5)
    assert steady(controller, clock, 1000) == pytest.approx(0.5)  # never below its bound
    within = steady(controller, clock, 3)  # the spike goes on until it is almost over
    assert ENDS < 0.3 < BEGINS
    assert within == pytest.approx(1 - 0.5 * 0.3, abs=1e-3)
    assert steady(controller, clock, 0) == 1
    assert steady(controller, clock, 3) == 1
    # One moment with many texts is smoothed away.
    clock.seconds += SECONDS / 100
    controller(20)
    assert controller.rule.lenience == 1


def test_time_without_texts_counts_as_no_load() -> None:
    clock = Clock()
    controller = DynamicLenience(SpeculativeSampling(), 0.3, 16, clock)
    controller(0)
    clock.seconds += 3600
    controller(16)  # the first texts after an hour
    assert (controller.load, controller.rule.lenience) == (0, 1)
    clock.seconds += SECONDS / 100
    controller(0)
    assert 0 < controller.load < 0.02
    assert controller.rule.lenience == 1
    assert steady(controller, clock, 16) < 0.31
    clock.seconds += SECONDS / 100
    controller(0)  # they are answered
    clock.seconds += 3600
    controller(1)
    assert (controller.load, controller.rule.lenience) == (pytest.approx(0), 1)


def test_texts_that_give_up_are_no_load(endless: Any) -> None:
    """The thread that decodes sleeps then: nothing else would say that they are gone."""
    seen: list[int] = []
    with serving(endless, max_rows=1) as running, running.client() as client:
        running.batcher.on_waiting = seen.append
        body = {"model": MODEL, "prompt": ["abc", "b", "c"], "max_tokens": 500, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines())
            until(lambda: 2 in seen)
        running.until_idle()
        until(lambda: seen[-1] == 0)


def test_lenience_moves_between_the_rules_own_and_the_lower_bound() -> None:
    clock = Clock()
    controller = DynamicLenience(RULES["lenience"](lenience=0.8), 0.4, 2, clock)
    assert steady(controller, clock, 0) == 0.8
    assert steady(controller, clock, 2) == pytest.approx(0.4)
    for rule, low, problem in (
        (RULES["lenience"](lenience=0.3), 0.4, "above the rule's lenience"),
        (RULES["typical"](), 0.4, "the rule is TypicalAcceptance"),
        (SpeculativeSampling(), 0.0, "lower bound of l"),
        (SpeculativeSampling(), 1.5, "lower bound of l"),
    ):
        with pytest.raises(UserError, match=problem):
            DynamicLenience(rule, low, 2, clock)


def lenience(running: Running) -> float:
    return running.metrics()["draftsmith:lenience"]


def test_texts_are_exact_without_a_spike_and_lenient_in_one(
    endless: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftsmith.serve.dynamic_lenience.SECONDS", 1e-3)
    expected = words(alone(endless, asked(QUESTION), 40, SAMPLED, seed=7))
    body: Any = {"max_tokens": 40, "seed": 7}
    options: Any = {"max_rows": 1, "options": {"dynamic_lenience": 0.2}}
    with (
        serving(endless, settings=SAMPLED, **options) as running,
        running.client() as client,
    ):
        answer = ask(client, **body)
        assert text_of(answer) == expected
        assert "dynamic_lenience=0.2" in answer.headers["x-draftsmith-lossy"]
        assert lenience(running) == 1
        with ThreadPoolExecutor(4) as pool:
            post = [pool.submit(ask, client, **body) for _ in range(4)]
            until(lambda: lenience(running) < 0.5)
            assert all(done.result().status_code == 200 for done in post)
        assert ask(client, **body).status_code == 200
        assert lenience(running) == 1
        off = set_to(client, dynamic_lenience=1).json()
        assert off["lossy"] is None
        answer = ask(client, **body)
        assert "x-draftsmith-lossy" not in answer.headers
        assert text_of(answer) == expected
