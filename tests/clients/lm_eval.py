import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

# A task of our own: lm-eval loads those it ships from the hub.
TASK = """\
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: ROWS}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs:
  until: ["\\n\\n", "Question:", "Q:", "</s>", "<|im_end|>", "<end_of_turn>"]
  max_gen_toks: 16
metric_list: [{metric: exact_match}]
"""
ROWS = ({"question": "1 + 1 =", "answer": "2"}, {"question": "2 + 2 =", "answer": "4"})
ADDRESS = f"{os.environ['BASE_URL']}/completions"

with tempfile.TemporaryDirectory() as place:
    rows = Path(place, "rows.jsonl")
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    Path(place, "sums.yaml").write_text(
        TASK.replace("ROWS", json.dumps(str(rows))), encoding="utf-8"
    )
    settings = f"model={os.environ['MODEL']},base_url={ADDRESS},tokenizer_backend=None"
    model = ["--model", "local-completions", "--model_args", settings]
    files = ["--include_path", place, "--log_samples", "--output_path", place]
    subprocess.run(
        [sys.executable, "-P", "-m", "lm_eval", *model, "--tasks", "sums", *files],
        check=True,
        stdout=sys.stderr,
    )
    samples = next(Path(place).rglob("samples_*.jsonl")).read_text("utf-8").splitlines()
    print([json.loads(sample)["resps"][0][0] for sample in samples])
