#!/usr/bin/env bash
# Versions: torch 2.13.0
# Behaviour: kl_div of a law with itself is NaN where the law has an entry of probability 0, with log_target and
#   without. kl_divergence of torch.distributions gives 0.
# Guess: 0 * log(0) counts as 0, as the documentation of xlogy says of the half that it computes. So two laws that
#   top-k, a grammar or a draft vocabulary cut in the same way can be compared.
# Seen:
#   kl_div: nan
#   kl_div with log_target: nan
#   kl_divergence: 0.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 || exit 2
"$folder/venv/bin/python" - <<'END'
import sys

import torch
import torch.nn.functional as F
from torch.distributions import Categorical, kl_divergence

law = torch.tensor([[0.5, 0.5, 0.0]])
seen = {
    "kl_div": F.kl_div(law.log(), law, reduction="sum").item(),
    "kl_div with log_target": F.kl_div(law.log(), law.log(), reduction="sum", log_target=True).item(),
    "kl_divergence": kl_divergence(Categorical(law), Categorical(law)).item(),
}
for name, value in seen.items():
    print(f"{name}: {value}")
sys.exit(0 if [str(value) for value in seen.values()] == ["nan", "nan", "0.0"] else 1)
END
