import os
import subprocess
import sys
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as place:
    Path(place, "extra-openai-models.yaml").write_text(
        "- model_id: served\n"
        f"  model_name: {os.environ['MODEL']}\n"
        f"  api_base: {os.environ['BASE_URL']}\n",
        encoding="utf-8",
    )
    command = [Path(sys.executable).parent / "llm", "-m", "served", "--key", "none"]
    options = ["-o", "temperature", "0", "-o", "max_tokens", "16", os.environ["PROMPT"]]
    ran = subprocess.run(
        [*command, *options],
        env={**os.environ, "LLM_USER_PATH": place},
        stdout=subprocess.PIPE,
        encoding="utf-8",
        check=True,
    )
print(ran.stdout.removesuffix("\n"))
