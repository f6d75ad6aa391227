"""The random decodes find a pass whose sums have another order than those of plain decoding."""

from typing import Any

import pytest
import torch

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
    last = capsys.readouterr().out.splitlines()[-1]
    assert (" 0 differ" in last) != planted
