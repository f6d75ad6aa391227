"""The exact part of `draftsmith audit`: the enumerated law, its χ², and the tiny models."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from decode.base.errors import UserError
from decode.drafters.small_lm import SmallLMDrafter
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder
from decode.model.loading import Target, load_target
from decode.opening.directory import open_drafter
from decode.rules import Rule
from decode.rules.speculative import SpeculativeSampling
from draftsmith.auditing import exact
from draftsmith.auditing.audit_options import AuditOptions
from draftsmith.auditing.findings import Finding, Judgement
from draftsmith.auditing.texts import EngineText
from draftsmith.auditing.tiny import NOISE, tiny_model, write_tiny
from draftsmith.export.export_directory import check_export
from tests.lossless import LONGER, PENALISED, Case, exact_law
from tests.mutants import WrongResidualRow
from tests.tiny import tiny_target
from train.measure.joint_law import joint_laws

PLAIN, END = Sampling(1.0), 7


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tiny") / "models"
    write_tiny(out)
    return out


@pytest.fixture(scope="module")
def target(tiny: Path) -> Target:
    return load_target(str(tiny / "target"), dtype="float32", device="cpu")


@pytest.mark.parametrize("case", [replace(LONGER, new=4), replace(PENALISED, new=3)])
def test_the_law_is_that_of_transformers_processors(case: Case) -> None:
    for prompt, expected in zip(case.prompts, exact_law(case), strict=True):
        laws = joint_laws(case.model(0.0), prompt, case.new, case.sampling, ends=case.eos)
        found = np.zeros_like(expected)
        for text, p in laws[-1].items():
            found[(*text, *[case.vocab] * (case.new - len(text)))] = p
        assert found == pytest.approx(expected, abs=1e-6)
        assert [sum(law.values()) for law in laws] == pytest.approx([1.0] * case.new)


def test_too_many_texts_are_refused() -> None:
    with pytest.raises(UserError, match="set top_k to 4"):
        exact.exact_laws(tiny_target(), [[5, 6]], PLAIN, 3)


def findings(texts: list[list[tuple[int, ...]]], laws: list[exact.Laws]) -> list[Finding]:
    given = [EngineText(i, (), text) for i, of_prompt in enumerate(texts) for text in of_prompt]
    return exact.exact_findings(given, laws, level=1e-3)


def drawn(laws: list[exact.Laws], count: int, rng: np.random.Generator) -> Iterator[list[Finding]]:
    while True:
        texts = []
        for law in laws:
            names, p = list(law[-1]), np.array([*law[-1].values()])
            texts.append([names[i] for i in rng.choice(len(names), count, p=p / p.sum())])
        yield findings(texts, laws)


def test_draws_from_the_law_pass_at_the_level(target: Target) -> None:
    laws = exact.exact_laws(target, exact.random_prompts(target, 2), PLAIN, 3)
    runs = drawn(laws, 400, np.random.default_rng(0))
    values = [finding.p for _ in range(60) for finding in next(runs) if finding.p is not None]
    shares = [np.mean(np.array(values) < p) for p in (0.5, 0.1, 0.01)]
    assert shares == pytest.approx([0.5, 0.1, 0.01], abs=0.08)


@pytest.mark.parametrize(
    ("rule", "right"), [(SpeculativeSampling, True), (WrongResidualRow, False)]
)
def test_the_residual_of_the_wrong_row_is_found(
    target: Target, rule: type[Rule], right: bool
) -> None:
    """The transform does not find it: what it favours is nowhere together in its orders."""
    prompts, tokens = exact.random_prompts(target, 2), AuditOptions().exact_tokens
    decoder = Decoder(
        target.model, SmallLMDrafter(tiny_model(NOISE)), eos_token_ids=target.eos_token_ids,
        gamma=3, rule=rule(), sampling=PLAIN,
    )  # fmt: skip
    texts = [decoder.decode([prompt] * 2048, tokens).outputs for prompt in prompts]
    laws = exact.exact_laws(target, prompts, PLAIN, tokens)
    found = findings([[tuple(text) for text in of_prompt] for of_prompt in texts], laws)
    wrong = {finding.name for finding in found if finding.verdict is Judgement.WRONG}
    assert not wrong if right else "the first 4 tokens together" in wrong
    assert max(finding.p for finding in found if finding.p is not None) > 0


def test_tiny_models_are_complete(tiny: Path, target: Target) -> None:
    assert target.eos_token_ids == (END,)
    assert check_export(tiny / "eagle-vllm")["layout"] == "eagle1"
    of_file = load_target(str(tiny / "target.gguf"), dtype="float32", device="cpu")
    prompts = exact.random_prompts(target, 16)
    texts = []
    for model, name in ((target, "drafter"), (target, "eagle"), (of_file, "drafter.gguf")):
        decoder = Decoder(model.model, open_drafter(str(tiny / name), model), gamma=3)
        decoded = decoder.decode(prompts, 24)
        assert 0.1 < decoded.counts.acceptance_rate < 0.9
        texts.append(decoded.outputs)
    assert texts[0] == texts[1] == texts[2]
    with pytest.raises(UserError, match="nothing is overwritten"):
        write_tiny(tiny)
