"""Draws what the pages explain: `python docs/drawings.py` writes docs/*.svg.

Every number in a drawing comes from the formula beside it in docs/concepts.md.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

# Fill, border and text of a box.
TEXT = "#eceff1", "#90a4ae", "#1c2b33"
DRAFT = "#fff8e1", "#f9a825", "#1c2b33"
ACCEPTED = "#e8f5e9", "#2e7d32", "#1c2b33"
REJECTED = "#ffebee", "#c62828", "#c62828"
UNREACHED = "#f5f5f5", "#bdbdbd", "#757575"
TARGETS = "#e3f2fd", "#1565c0", "#1c2b33"
LABEL, LINE = "#44545c", "#b0bec5"
# Okabe and Ito's colours, as in the report.
CURVES = ("#0072b2", "#d55e00", "#007f5f", "#b8578f")
VERIFICATION_COST = 1.1  # v of the example in docs/concepts.md
LOWEST, HIGHEST = 0.1, 0.98  # acceptance rates that are drawn

Style = tuple[str, str, str]
Point = tuple[float, float]


def svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    """A drawing on white, readable on light and dark pages."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            'font-family="sans-serif" font-size="15" role="img">',
            f"<title>{title}</title>",
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            *parts,
            "</svg>\n",
        ]
    )


def box(x: float, y: float, words: str, style: Style, width: float = 68, height: int = 32) -> str:
    """A box with text in its middle. x, y: its upper left corner."""
    fill, border, ink = style
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="{fill}" '
        f'stroke="{border}"/><text x="{x + width / 2}" y="{y + 21}" text-anchor="middle" '
        f'fill="{ink}">{words}</text>'
    )


def words_at(x: float, y: float, words: str, *, anchor: str = "start", ink: str = LABEL) -> str:
    """A line of small text."""
    return (
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{ink}" font-size="14">{words}</text>'
    )


def line(start: Point, end: Point, ink: str = LINE, width: int = 1, *, dashed: bool = False) -> str:
    """A straight line."""
    dashes = ' stroke-dasharray="5 4"' if dashed else ""
    return (
        f'<line x1="{start[0]}" y1="{start[1]}" x2="{end[0]}" y2="{end[1]}" stroke="{ink}" '
        f'stroke-width="{width}"{dashes}/>'
    )


def step() -> str:
    """One step of a chain: draft, verdicts, and the new text."""
    text, draft = ("The", "sky", "is"), ("blue", "because", "the", "sun")
    verdicts = [("✓", ACCEPTED), ("✓", ACCEPTED), ("✗", REJECTED), ("–", UNREACHED)]
    titles = ("text so far", "drafter, γ = 4", "target, one pass", "new text")
    parts = [words_at(14, y, words) for y, words in zip((45, 110, 175, 235), titles, strict=True)]
    parts += [box(150 + 76 * i, 24, word, TEXT) for i, word in enumerate(text)]
    for i, (word, (verdict, style)) in enumerate(zip(draft, verdicts, strict=True), len(text)):
        x = 150 + 76 * i
        parts.append(box(x, 89, word, DRAFT))
        parts.append(line((x + 34, 121), (x + 34, 154)))
        parts.append(box(x, 154, verdict, style))
        if style is REJECTED:  # the target's own token takes its place
            parts.append(line((x + 34, 186), (x + 34, 214), TARGETS[1], dashed=True))
    new = [(word, TEXT) for word in text] + [(word, ACCEPTED) for word in draft[:2]]
    for i, (word, style) in enumerate([*new, ("light", TARGETS)]):
        parts.append(box(150 + 76 * i, 214, word, style))
    return svg(760, 250, "One speculative step", parts)


def tree() -> str:
    """A tree draft: siblings, the accepted path, and the target's token after it."""
    # By name: column, row, word, and what the target makes of it.
    nodes = {
        "root": (0, 1.0, "is", TEXT),
        "a": (1, 0.5, "clear", UNREACHED),
        "b": (1, 2.0, "blue", ACCEPTED),
        "aa": (2, 0.0, "today", UNREACHED),
        "ab": (2, 1.0, "and", UNREACHED),
        "ba": (2, 2.0, "because", ACCEPTED),
        "bb": (2, 3.0, "and", UNREACHED),
        "baa": (3, 1.5, "the", REJECTED),
        "bab": (3, 2.5, "of", REJECTED),
    }
    edges = ("root-a", "root-b", "a-aa", "a-ab", "b-ba", "b-bb", "ba-baa", "ba-bab")
    width, height, left, top = 92, 32, 130, 52

    def corner(name: str) -> Point:
        column, row, *_ = nodes[name]
        return left + 140 * column, top + 46 * row

    titles = ("text so far", "depth 1", "depth 2", "depth 3", "target")
    columns = enumerate(titles)
    parts = [
        words_at(left + 140 * i + width / 2, 30, words, anchor="middle") for i, words in columns
    ]
    for edge in edges:
        parent, child = edge.split("-")
        (x, y), (to_x, to_y) = corner(parent), corner(child)
        accepted = nodes[child][3] is ACCEPTED
        ink, thick = (ACCEPTED[1], 3) if accepted else (LINE, 1)
        start, end = (x + width, y + height / 2), (to_x, to_y + height / 2)
        parts.append(line(start, end, ink, thick))
    x, y = corner("ba")
    answer = left + 140 * 4, y
    parts.append(line((x + width, y + 16), (answer[0], y + 16), TARGETS[1], dashed=True))
    parts += [box(*corner(name), node[2], node[3], width) for name, node in nodes.items()]
    parts.append(box(*answer, "light", TARGETS, width))
    parts.append(words_at(14, top + 46 + 21, "… The sky"))
    legend = (
        ("accepted path", ACCEPTED),
        ("rejected", REJECTED),
        ("not on that path", UNREACHED),
        ("the target's token", TARGETS),
    )
    x = 34.0
    for words, style in legend:
        parts.append(box(x, 238, "", style, 18, 18))
        parts.append(words_at(x + 26, 252, words))
        x += 56 + 7.4 * len(words)
    return svg(800, 272, "A tree of draft tokens, and the path that the target accepts", parts)


def tokens_per_step(acceptance: float, gamma: int) -> float:
    """τ of 2211.17192, equation 1."""
    return (1 - acceptance ** (gamma + 1)) / (1 - acceptance)


def speedup(acceptance: float, gamma: int, draft_cost: float) -> float:
    """τ / (γ·c + v)."""
    return tokens_per_step(acceptance, gamma) / (gamma * draft_cost + VERIFICATION_COST)


def break_even(gamma: int, draft_cost: float) -> float:
    """The acceptance rate from which drafts pay, by bisection."""
    low, high = 0.0, 1 - 1e-9
    for _ in range(50):
        middle = (low + high) / 2
        below = speedup(middle, gamma, draft_cost) < 1
        low, high = (middle, high) if below else (low, middle)
    return high


def speedup_curves() -> str:
    """The speed-up against acceptance for a few drafters, and where each breaks even."""
    left, top, width, height, most = 70, 24, 430, 270, 4.0
    settings = ((8, 0.02), (4, 0.1), (2, 0.1), (4, 0.3))

    def place(acceptance: float, value: float) -> Point:
        x = left + width * (acceptance - LOWEST) / (HIGHEST - LOWEST)
        return round(x, 1), round(top + height * (1 - value / most), 1)

    parts = []
    for value in range(int(most) + 1):
        start, end = place(LOWEST, value), place(HIGHEST, value)
        parts.append(line(start, end, "#1c2b33" if value == 1 else "#dde2e8"))
        parts.append(words_at(left - 10, start[1] + 5, f"{value}×", anchor="end"))
    for tenths in range(1, 10):
        x, y = place(tenths / 10, 0)
        parts.append(words_at(x, y + 20, f"{tenths / 10}", anchor="middle"))
    parts.append(words_at(left + width / 2, top + height + 42, "acceptance α", anchor="middle"))
    for number, ((gamma, cost), ink) in enumerate(zip(settings, CURVES, strict=True)):
        rates = [LOWEST + (HIGHEST - LOWEST) * i / 88 for i in range(89)]
        points = [place(a, value) for a in rates if (value := speedup(a, gamma, cost)) <= most]
        path = " ".join(f"{x},{y}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{ink}" stroke-width="2.5"/>')
        even = break_even(gamma, cost)
        x, y = place(even, 1)
        parts.append(f'<circle cx="{x}" cy="{y}" r="5" fill="{ink}" stroke="#ffffff"/>')
        y = top + 20 + 58 * number
        parts.append(line((530, y - 5), (556, y - 5), ink, 3))
        parts.append(words_at(566, y, f"γ = {gamma}, c = {cost}"))
        parts.append(words_at(566, y + 20, f"pays from α = {even:.2f}"))
    return svg(760, 350, f"Speed-up against acceptance, v = {VERIFICATION_COST}", parts)


def pass_costs() -> str:
    """What a step of the example costs, beside plain decoding of as many tokens."""
    gamma, cost, acceptance = 4, 0.1, 0.6
    tokens = tokens_per_step(acceptance, gamma)
    price = gamma * cost + VERIFICATION_COST
    left, unit = 150, 236

    def bars(y: int, lengths: Sequence[tuple[float, str, Style]]) -> Iterator[str]:
        ends = [0.0]
        for length, *_ in lengths:
            ends.append(ends[-1] + length)
        for (begin, end), (_, words, style) in zip(pairwise(ends), lengths, strict=True):
            yield box(
                round(left + unit * begin, 1), y, words, style, round(unit * (end - begin), 1)
            )

    plain = [(1.0, "1", TEXT)] * int(tokens) + [(tokens % 1, f"{tokens % 1:.2f}", TEXT)]
    drafts = [(cost, "c", DRAFT)] * gamma
    parts = [
        words_at(14, 45, "plain decoding"),
        *bars(24, plain),
        words_at(left, 76, f"{tokens:.2f} tokens cost {tokens:.2f}"),
        words_at(14, 121, "one step"),
        *bars(100, [*drafts, (VERIFICATION_COST, f"v = {VERIFICATION_COST}", TARGETS)]),
        words_at(
            left,
            152,
            f"τ = {tokens:.2f} tokens cost {gamma} × {cost} + {VERIFICATION_COST} = {price:.1f}: "
            f"{tokens:.2f} / {price:.1f} = {tokens / price:.2f} times as fast",
        ),
    ]
    return svg(760, 170, "The cost of one step, in plain steps", parts)


def transform() -> str:
    """The transform of docs/audit.md: a law by descending probability, and the u of a token."""
    left, unit = 150, 560
    law = (("blue", 0.5), ("grey", 0.25), ("clear", 0.15), ("green", 0.1))
    drawn, uniform = 1, 0.6
    begin = sum(p for _, p in law[:drawn])
    u = begin + uniform * law[drawn][1]
    parts = [words_at(14, 61, "law after “The sky is”"), words_at(14, 161, "bins of u")]
    x = float(left)
    for index, (word, p) in enumerate(law):
        style = TARGETS if index == drawn else TEXT
        parts.append(box(round(x, 1), 40, f"{word} {p}", style, round(unit * p, 1)))
        x += unit * p
    at = round(left + unit * u, 1)
    parts.append(line((at, 20), (at, 172), REJECTED[1], 2, dashed=True))
    for number in range(10):
        inside = int(10 * u) == number
        style = TARGETS if inside else UNREACHED
        parts.append(box(left + unit / 10 * number, 140, f"{number / 10}", style, unit / 10))
    parts.append(
        words_at(
            at,
            106,
            f"drawn: grey, so u = {begin} + U · {law[drawn][1]} = {u:.2f} with U = {uniform}",
            anchor="middle",
        )
    )
    return svg(760, 196, "From a drawn token to a number that is uniform", parts)


def threads() -> str:
    """The threads of the service, and what one hands to another."""
    loop, decode = (270, 92), (560, 92)
    beside = {14: "read: long bodies, grammars", 270: "write: long answers", 520: "settings"}
    parts = [
        line((140, 108), (270, 108)),
        words_at(14, 112, "clients (HTTP)"),
        box(*loop, "event loop", TEXT, 120),
        words_at(270, 145, "requests and answers"),
        line((390, 104), (560, 104)),
        words_at(475, 96, "prompts", anchor="middle"),
        line((390, 114), (560, 114)),
        words_at(475, 134, "text", anchor="middle"),
        box(*decode, "decode", TARGETS, 120),
        words_at(560, 145, "the only one that uses"),
        words_at(560, 163, "target and drafter"),
        box(560, 14, "learner", DRAFT, 120),
        line((620, 46), (620, 92), dashed=True),
        words_at(630, 74, "texts; new weights"),
    ]
    for x, words in beside.items():
        parts.append(box(x, 196, words, UNREACHED, 230))
        parts.append(line((330, 150), (x + 100, 196), dashed=True))
    return svg(780, 242, "The threads of the service", parts)


DRAWINGS: dict[str, Callable[[], str]] = {
    "step.svg": step,
    "tree.svg": tree,
    "speedup.svg": speedup_curves,
    "pass_costs.svg": pass_costs,
    "transform.svg": transform,
    "threads.svg": threads,
}

if __name__ == "__main__":
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for name, draw in DRAWINGS.items():
        (directory / name).write_text(draw(), encoding="utf-8")
