import os
import subprocess
import sys
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as place:
    file = Path(place, "greet.py")
    file.write_text('print("hello")\n', encoding="utf-8")
    model = ["--model", f"openai/{os.environ['MODEL']}", "--openai-api-key", "none"]
    server = ["--openai-api-base", os.environ["BASE_URL"]]
    quiet = ["--no-git", "--yes", "--no-check-update", "--no-show-model-warnings"]
    quiet += ["--no-analytics", "--no-show-release-notes", "--map-tokens", "0"]
    asked = ["--edit-format", "ask", "--message", os.environ["PROMPT"], file]
    ran = subprocess.run(
        [Path(sys.executable).parent / "aider", *model, *server, *quiet, *asked],
        cwd=place,
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        encoding="utf-8",
        check=True,
    )
assert "received" in ran.stdout, ran.stdout
print(ran.stdout)
