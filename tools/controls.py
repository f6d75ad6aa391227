"""How surely the tests find the negative controls of losslessness (`tests/controls.py`).

`python -m tools.controls` prints each with the statistic that finds it, the total variation of the
texts and the exact law, which chance alone keeps above 0, and the share of seeds in which it is
found; `--seeds` says how many. Drafters that learn have `LEARNING_SEEDS`. Then it prints the errors
whose outcomes are enumerated, not drawn, with their exact total variation. A few minutes in all.
"""

import argparse

import numpy as np

from tests.controls import CONTROLS, Control, LearningControl, enumerated, learning_controls

SEEDS, LEARNING_SEEDS = 20, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    seeds: int = parser.parse_args().seeds
    print("error", "statistic without it", "with it", "limit", end=" | ", sep=" | ")
    print("total variation without it", "with it", "seeds that find it", sep=" | ")
    for control in CONTROLS:
        _print(control, seeds)
    for learning in learning_controls():
        _print(learning, min(seeds, LEARNING_SEEDS))
    print("error, enumerated", "total variation", sep=" | ")
    for name, total_variation in enumerated().items():
        print(name, f"{total_variation(name):.4f}", sep=" | ", flush=True)


def _print(control: Control | LearningControl, seeds: int) -> None:
    sound = control.find(control.sound, 0)  # type: ignore[arg-type]
    found = [control.find(control.faulty, seed) for seed in range(seeds)]  # type: ignore[arg-type]
    print(
        control.name,
        f"{control.statistic} {sound.statistic:.4g}",
        f"{np.median([each.statistic for each in found]):.4g}",
        f"{sound.limit:.4g}",
        f"{sound.total_variation:.4f}",
        f"{np.median([each.total_variation for each in found]):.4f}",
        f"{sum(each.rejected for each in found)} of {len(found)}",
        sep=" | ",
        flush=True,
    )


if __name__ == "__main__":
    main()
