import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

KEY = "sk-" + secrets.token_hex(24)


def ask(address: str, body: dict | None = None) -> dict:
    request = urllib.request.Request(
        address,
        json.dumps(body).encode() if body else None,
        {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
proxy = f"http://127.0.0.1:{port}"
deployment = {"model": f"openai/{os.environ['MODEL']}", "api_base": os.environ["BASE_URL"]}
config = {
    "model_list": [
        {"model_name": "served", "litellm_params": {**deployment, "api_key": "none"}},
    ],
    "general_settings": {"master_key": KEY},
}
with tempfile.TemporaryDirectory() as place:
    file = Path(place, "config.yaml")
    file.write_text(json.dumps(config), encoding="utf-8")
    command = [Path(sys.executable).parent / "litellm", "--config", file, "--port", str(port)]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + 120
        while time.monotonic() < end:
            try:
                ask(f"{proxy}/health/liveliness")
                break
            except (urllib.error.URLError, ValueError):
                time.sleep(0.5)
        asked = {"model": "served", "temperature": 0}
        response = ask(
            f"{proxy}/v1/responses",
            {**asked, "input": os.environ["PROMPT"], "max_output_tokens": 16},
        )
        messages = [{"role": "user", "content": os.environ["PROMPT"]}]
        chat = ask(
            f"{proxy}/v1/chat/completions", {**asked, "messages": messages, "max_tokens": 16}
        )
        answer = chat["choices"][0]["message"]["content"]
        output = next(item for item in response["output"] if item["type"] == "message")
        assert output["content"][0]["text"] == answer, response
        print(answer)
    finally:
        running.terminate()
        running.wait(30)
