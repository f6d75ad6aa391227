"""What the site needs beyond the pages under git: the pages of the reference that are made from the
code, links into the repository, and the notebook as a page.

Pages link to files of the repository relatively (`../configs/quickstart.yaml`), which works on a
code host. On the site such a link goes to the repository's address, `repo_url`; without one it is
plain text.
"""

import json
import logging
import posixpath
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOG = logging.getLogger("mkdocs.hooks.repository")  # a warning ends a strict build
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)\s]+)\)")
NOTEBOOK = "first_drafter.ipynb"


def on_pre_build(**_: Any) -> None:
    """mkdocs calls this before it looks for pages: those of the reference are written. In a process
    of its own, because a trace of the code's steps must begin anew."""
    subprocess.run([sys.executable, "-m", "tools.reference", "--pages"], cwd=ROOT, check=True)


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """mkdocs calls this for each page before it is rendered."""
    source = page.file.src_uri
    text, missing = with_repository_links(markdown, source, config.repo_url)
    for target in missing:
        LOG.warning("%s links to %s, which is not in the repository", source, target)
    return text


def with_repository_links(
    markdown: str, source: str, repository: str | None
) -> tuple[str, list[str]]:
    """The text with its links out of docs/ rewritten, and the targets that do not exist.

    source: the page's path in docs/. Code blocks stay as they are.
    """
    missing: list[str] = []

    def rewritten(match: re.Match[str]) -> str:
        words, target = match.groups()
        path, _, anchor = target.partition("#")
        inside = posixpath.normpath(posixpath.join("docs", posixpath.dirname(source), path))
        if inside.startswith("docs/"):
            return match[0]  # a page beside it
        if not (ROOT / inside).exists():
            missing.append(target)
        if not repository:
            return words
        kind = "tree" if (ROOT / inside).is_dir() else "blob"
        address = f"{repository.rstrip('/')}/{kind}/main/{inside}"
        return f"[{words}]({address}{'#' + anchor if anchor else ''})"

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    parts[::2] = [_LINK.sub(rewritten, part) for part in parts[::2]]
    return "".join(parts), missing


def on_files(files: Any, *, config: Any) -> Any:
    """mkdocs calls this once: the notebook becomes a page."""
    from mkdocs.structure.files import File

    notebook = json.loads((ROOT / "docs" / NOTEBOOK).read_text("utf-8"))
    page = f"{notebook_page(notebook)}\n[Download this notebook]({NOTEBOOK})\n"
    files.append(File.generated(config, "notebook.md", content=page))
    return files


def notebook_page(notebook: dict[str, Any]) -> str:
    """A notebook as Markdown: text, code, what the code printed, and its plots."""
    parts = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", ()):
            if image := output.get("data", {}).get("image/png"):
                parts.append(f"![a plot](data:image/png;base64,{''.join(image).strip()})")
            elif printed := "".join(output.get("text", ())).rstrip():
                parts.append(f"```text\n{printed}\n```")
    return "\n\n".join(parts) + "\n"
