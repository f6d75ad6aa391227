"""Each client's default use against the served embedded target (`make test-clients`)."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.serve.client import ask
from benchmarks.serve.process import MODEL, ServiceProcess, serve_command
from tests.clients import CLIENTS, PLACE, Client

PROMPT, TOKENS = "Why is the sky blue?", 16
INSTALLED = Path(os.environ.get("DRAFTSMITH_ENGINES", ".engines")).absolute() / "clients"


@pytest.fixture(scope="module")
def service() -> Iterator[tuple[str, str]]:
    """The address of a service, and the greedy answer that a plain HTTP request gets."""
    options = ("--device", "cpu", "--dtype", "float32")
    with ServiceProcess(serve_command("embedded:smollm2-135m", "ngram", *options)) as process:
        messages = [{"role": "user", "content": PROMPT}]
        asked = {"messages": messages, "max_tokens": TOKENS, "temperature": 0}
        yield process.url, ask(process.url, {"model": MODEL, **asked}).texts[0]


def command(client: Client) -> list[str]:
    """The client's script in the environment that pins it. Skips the test where that is missing."""
    place = INSTALLED / client.environment
    if not (place / ".installed").exists():
        pytest.skip(f"{place} is missing; install it with: make test-clients")
    if client.environment == "node":
        # node looks for packages beside the script.
        return ["node", str(place / client.script)]
    # -P: a script's folder is not searched for packages; scripts have packages' names.
    return [str(place / "bin" / "python"), "-P", str(PLACE / client.script)]


@pytest.mark.client
@pytest.mark.timeout(300)
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.script)
def test_default_use(client: Client, service: tuple[str, str], tmp_path: Path) -> None:
    url, answer = service
    settings = {"BASE_URL": f"{url}/v1", "MODEL": MODEL, "PROMPT": PROMPT}
    # No client asks the network for prices, news or tokenizers.
    quiet = {"DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    home = {"HOME": str(tmp_path), "OPENAI_API_KEY": "none"}
    # The clients' Python must not see this project's packages.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(
        command(client),
        env={**inherited, **settings, **quiet, **home},
        cwd=tmp_path,
        capture_output=True,
        encoding="utf-8",
        timeout=240,
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    said = ran.stdout.removesuffix("\n")
    assert said == answer if client.exact else said.strip()


def pinned(client: Client) -> str:
    """The version that the client's environment pins."""
    if client.environment == "node":
        return json.loads((PLACE / "package.json").read_text("utf-8"))["dependencies"][
            client.package
        ]
    pins = (PLACE / f"{client.environment}.txt").read_text("utf-8")
    found = re.search(rf"^{re.escape(client.package)}==(\S+)$", pins, re.MULTILINE)
    assert found, f"{client.package} is not pinned in {client.environment}.txt"
    return found[1]


def test_the_page_names_every_client_and_its_pinned_version() -> None:
    rows = Path("docs/clients.md").read_text(encoding="utf-8").splitlines()
    for client in CLIENTS:
        assert (PLACE / client.script).is_file()
        row = f"| `{client.package}` {pinned(client)} "
        assert any(line.startswith(row) for line in rows), row
