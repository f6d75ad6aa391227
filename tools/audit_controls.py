"""What finds the errors of servers (`tests/audit_controls.py`), and whether honest ones pass.

`python -m tools.audit_controls` audits each of them and the same servers without the error, and
prints what finds it, with its p-value. `--texts` says how many answers the transform gets. Then it
does the same by enumeration (`tools.audit_laws`), and audits honest servers with many seeds.

It takes an hour, so it also runs in pieces: `--only WORD` takes what has the word in its name, as
the honest servers do ("honest servers, by the transform", "…, by enumeration", "…, in bfloat16"),
and `--first-seed` says where the seeds of the honest servers begin.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from draftsmith.auditing.findings import Audit, Finding, Judgement
from draftsmith.auditing.report import written_p
from tests.audit_controls import CONTROLS, HALF, ServedControl
from tools.audit_laws import LAW_CONTROLS

# An honest engine with numbers of 16 bits, whose texts rounding moves.
HALF_HONEST = ServedControl("honest in bfloat16", **HALF)


def found_by(audited: Audit) -> list[Finding]:
    return [finding for finding in audited.findings if finding.verdict is Judgement.WRONG]


# Servers without an error, each audited with other random numbers.
HONEST: dict[str, Callable[[int], Audit]] = {
    "honest servers, by the transform": lambda seed: CONTROLS[0].audit(96, broken=False, seed=seed),
    "honest servers, by enumeration": lambda seed: replace(LAW_CONTROLS[0], texts=1024).audit(
        broken=False, seed=seed
    ),
    "honest servers, in bfloat16": lambda seed: HALF_HONEST.audit(48, broken=False, seed=seed),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--seeds", type=int, default=20, help="honest servers of each kind")
    parser.add_argument("--first-seed", type=int, default=0, help="of the honest servers")
    parser.add_argument("--only", default="", help="a part of a name")
    chosen = parser.parse_args()
    begin = time.monotonic()
    print("error", "without it", "with it", "found by", "p", "seconds", sep=" | ")
    without: dict[tuple[str, ...], Audit] = {}
    for control in CONTROLS:
        if chosen.only not in control.name:
            continue
        start = time.monotonic()
        broken = control.audit(chosen.texts, broken=True)
        alike = str(control.sampling), str(control.settings), str(control.sound)
        if alike not in without:
            without[alike] = control.audit(chosen.texts, broken=False)
        _print(control.name, without[alike], broken, time.monotonic() - start)
    for by_law in LAW_CONTROLS:
        if chosen.only in by_law.name:
            start = time.monotonic()
            broken = by_law.audit(broken=True)
            _print(by_law.name, by_law.audit(broken=False), broken, time.monotonic() - start)
    for name, of_seed in HONEST.items():
        if chosen.only in name:
            first = chosen.first_seed
            _print_honest(name, [of_seed(first + number) for number in range(chosen.seeds)])
    print(f"{time.monotonic() - begin:.0f} seconds in all")


def _print_honest(name: str, audits: Sequence[Audit]) -> None:
    passed = [found.verdict is Judgement.EQUAL for found in audits]
    tests = [x for found in audits for x in found.findings if x.p is not None]
    least = min(tests, key=lambda finding: finding.p or 0.0)
    print(
        f"{name} pass: {sum(passed)} of {len(passed)}; the smallest p of "
        f"{len(tests)} tests is {written_p(least)}, {least.group} {least.name}",
        flush=True,
    )


def _print(name: str, without: Audit, broken: Audit, seconds: float) -> None:
    found = sorted(found_by(broken), key=lambda finding: finding.p or 0.0)
    tests = [finding for finding in found if finding.p is not None]
    print(
        name,
        without.verdict,
        broken.verdict,
        ", ".join(f"{x.group} {x.name}" for x in found),
        written_p(tests[0]) if tests else "",
        f"{seconds:.0f}",
        sep=" | ",
        flush=True,
    )


if __name__ == "__main__":
    main()
