"""Tables of generated pages."""


def table(titles: list[str], rows: list[list[str]]) -> list[str]:
    """The lines of a table."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), *cells)]
