"""Run by the Python of OpenVINO's environment: `openvino_decode_child.py JOB`.

JOB: {target, drafter: model directories, converted: a directory for the converted models, kind:
plain, drafter or lookup, precision: float32 or bfloat16, gamma, max_n, threads}. It reads lines
{prompt: token ids, tokens: a number} and writes a line for each: {tokens, drafted, accepted}.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from openvino_tokenizers import convert_tokenizer
from optimum.intel import OVModelForCausalLM
from transformers import AutoTokenizer

PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}


def main(job_file: str) -> None:
    # What the libraries print goes to the errors: a line of output is an answer.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    pipeline = made(job)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        found = decoded(pipeline, job, asked["prompt"], asked["tokens"])
        print(json.dumps(found), file=answers, flush=True)


def converted(job: Any, name: str) -> str:
    """The directory of a model in OpenVINO's format, made if it is not there. OpenVINO requires the
    tokenizer too, although all prompts are token ids."""
    directory = Path(job["converted"]) / name
    if not directory.exists():
        model = OVModelForCausalLM.from_pretrained(
            job[name], export=True, compile=False, load_in_8bit=False, dtype=job["precision"]
        )
        model.save_pretrained(directory)
        parts = convert_tokenizer(
            AutoTokenizer.from_pretrained(job["target"]), with_detokenizer=True
        )
        for part, what in zip(parts, ("tokenizer", "detokenizer"), strict=True):
            openvino.save_model(part, directory / f"openvino_{what}.xml")
    return str(directory)


def made(job: Any) -> Any:
    options: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": PRECISIONS[job["precision"]],
        "INFERENCE_NUM_THREADS": job["threads"],
    }
    scheduling = openvino_genai.SchedulerConfig()
    scheduling.cache_size = 1  # GB
    scheduling.enable_prefix_caching = False
    scheduling.max_num_seqs = 1
    more: dict[str, Any] = {}
    if job["kind"] == "drafter":
        drafter = openvino_genai.draft_model(converted(job, "drafter"), "CPU", **options)
        more = {"draft_model": drafter}
    elif job["kind"] == "lookup":
        more = {"prompt_lookup": True}
    target = converted(job, "target")
    return openvino_genai.LLMPipeline(target, "CPU", scheduler_config=scheduling, **options, **more)


def decoded(pipeline: Any, job: Any, prompt: list[int], tokens: int) -> dict[str, Any]:
    settings = openvino_genai.GenerationConfig()
    settings.max_new_tokens, settings.do_sample, settings.ignore_eos = tokens, False, True
    if job["kind"] != "plain":
        settings.num_assistant_tokens = job["gamma"]
    if job["kind"] == "lookup":
        settings.max_ngram_size = job["max_n"]
    ids = np.array([prompt], dtype=np.int64)
    tensors = openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids))
    result = pipeline.generate(openvino_genai.TokenizedInputs(*tensors), settings)
    drafted = accepted = 0
    if job["kind"] != "plain" and result.extended_perf_metrics is not None:
        drafted = result.extended_perf_metrics.get_num_draft_tokens()
        accepted = result.extended_perf_metrics.get_num_accepted_tokens()
    return {"tokens": list(result.tokens[0]), "drafted": drafted, "accepted": accepted}


if __name__ == "__main__":
    main(sys.argv[1])
