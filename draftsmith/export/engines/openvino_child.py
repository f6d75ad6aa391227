"""Run by the Python of OpenVINO's environment: `openvino_child.py JOB ANSWER PROGRESS`.

JOB: {target, drafter: model directories, converted: a directory for the converted models, prompts,
gamma, max_new_tokens, eos}. ANSWER: {plain, drafted: {texts, seconds}, drafted_tokens,
accepted_tokens}.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from openvino_tokenizers import convert_tokenizer
from optimum.intel import OVModelForCausalLM
from transformers import AutoTokenizer

# The dtype of the weights. By default OpenVINO computes in bfloat16 if the processor supports it.
PRECISION = {"INFERENCE_PRECISION_HINT": "f32"}


def main(job_file: str, answer_file: str, progress_file: str) -> None:
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    with open(progress_file, "a", encoding="utf-8") as progress:
        for name in ("target", "drafter"):
            convert(job[name], Path(job["converted"]) / name)
            print(".", end="", file=progress, flush=True)
        plain, _ = run(job, None, progress)
        drafter = openvino_genai.draft_model(
            str(Path(job["converted"]) / "drafter"), "CPU", **PRECISION
        )
        drafted, counts = run(job, drafter, progress)
    answer = {
        "plain": plain,
        "drafted": drafted,
        "drafted_tokens": counts[0],
        "accepted_tokens": counts[1],
    }
    Path(answer_file).write_text(json.dumps(answer), encoding="utf-8")


def convert(source: str, directory: Path) -> None:
    """Convert a model directory to OpenVINO's format in float32. OpenVINO requires the tokenizer
    too, although all prompts are token ids."""
    model = OVModelForCausalLM.from_pretrained(
        source, export=True, compile=False, load_in_8bit=False, dtype="float32"
    )
    model.save_pretrained(directory)
    parts = convert_tokenizer(AutoTokenizer.from_pretrained(source), with_detokenizer=True)
    for part, name in zip(parts, ("tokenizer", "detokenizer"), strict=True):
        openvino.save_model(part, directory / f"openvino_{name}.xml")


def run(job: Any, drafter: Any, progress: Any) -> tuple[dict[str, Any], list[int]]:
    """Decode the prompts one by one; return texts and seconds, and the engine's counts of drafted
    and accepted tokens."""
    scheduling = openvino_genai.SchedulerConfig()
    scheduling.cache_size = 1  # GB
    scheduling.enable_prefix_caching = False
    scheduling.max_num_seqs = 1
    options = PRECISION if drafter is None else {**PRECISION, "draft_model": drafter}
    pipeline = openvino_genai.LLMPipeline(
        str(Path(job["converted"]) / "target"), "CPU", scheduler_config=scheduling, **options
    )
    counts = [0, 0]

    def decode(prompt: list[int], tokens: int) -> list[int]:
        settings = openvino_genai.GenerationConfig()
        settings.max_new_tokens = tokens
        settings.do_sample = False
        settings.stop_token_ids = set(job["eos"])
        if drafter is not None:
            settings.num_assistant_tokens = job["gamma"]
        ids = np.array([prompt], dtype=np.int64)
        result = pipeline.generate(
            openvino_genai.TokenizedInputs(
                openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids))
            ),
            settings,
        )
        if drafter is not None:
            counts[0] += result.extended_perf_metrics.get_num_draft_tokens()
            counts[1] += result.extended_perf_metrics.get_num_accepted_tokens()
        print(".", end="", file=progress, flush=True)
        return list(result.tokens[0])

    decode(job["prompts"][0], 4)  # warm-up
    counts[:] = [0, 0]
    begin = time.perf_counter()
    texts = [decode(prompt, job["max_new_tokens"]) for prompt in job["prompts"]]
    seconds = time.perf_counter() - begin
    return {"texts": texts, "seconds": seconds}, counts


if __name__ == "__main__":
    main(*sys.argv[1:])
