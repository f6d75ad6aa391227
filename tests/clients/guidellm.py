import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ADDRESS = os.environ["BASE_URL"].removesuffix("/v1")

with tempfile.TemporaryDirectory() as place:
    prompts, report = Path(place, "prompts.jsonl"), Path(place, "report.json")
    prompts.write_text((json.dumps({"prompt": os.environ["PROMPT"]}) + "\n") * 3, encoding="utf-8")
    load = ["--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=3"]
    files = ["--data", f"kind=json_file,path={prompts}", "--output", f"kind=json,path={report}"]
    server = ["--backend", f"kind=openai_http,target={ADDRESS}"]
    command = [Path(sys.executable).parent / "guidellm", "run", "--disable-console-interactive"]
    subprocess.run(
        [*command, *server, *load, *files],
        check=True,
        stdout=sys.stderr,
    )
    requests = json.loads(report.read_text(encoding="utf-8"))["benchmarks"][0]["requests"]
    assert len(requests["successful"]) == 3, requests
    assert not requests["errored"], requests
    print(requests["successful"][0]["output"])
