"""The random decodes run what they say, and find sums in another order than plain decoding's."""

from typing import Any

import pytest
import torch

from decode.model.forward import few_rows
from decode.model.forward.few_rows_layers import FewRowsPass
from tests.export import needs_few_rows
from tools import random_decodes


@pytest.mark.parametrize("planted", [False, True])
def test_an_order_of_sums_that_depends_on_the_tokens_is_found(
    planted: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_few_rows(torch.bfloat16)
    monkeypatch.setattr(random_decodes, "TARGETS", {"bfloat16": random_decodes.TARGETS["bfloat16"]})
    monkeypatch.setattr(random_decodes, "KINDS", ("first layers", "kangaroo", "ngram"))
    fits = FewRowsPass.fits

    def one_token(states: torch.Tensor, *rest: Any) -> bool:
        return states.shape[1] == 1 and fits(states, *rest)

    if planted:
        monkeypatch.setattr(FewRowsPass, "fits", one_token)
    assert random_decodes.main(30, seed=1) == planted
    *_, line, last = capsys.readouterr().out.splitlines()
    assert "; layers in C++, " in line
    assert (" 0 differ" in last) != planted


def test_targets_are_packed_in_all_forms() -> None:
    needs_few_rows(torch.float32)
    found = {name: random_decodes.runs_in(case) for name, case in random_decodes.TARGETS.items()}
    cpp = "layers in C++, weights packed in C++: "
    assert found["narrow"] == "layers in PyTorch, weights packed in C++: none"
    assert found["float32"] == cpp + "float32"
    twelve = hasattr(few_rows.library(torch.float32), "pack_twelve_bits")
    assert found["rounded"] == cpp + ("bfloat16, 12 bits a weight" if twelve else "bfloat16")
    forms = found["quantised"].removeprefix(cpp).split(", ")
    assert set(forms) == {"Q4_1", "Q8_0 or Q5_0", "mixed"}
