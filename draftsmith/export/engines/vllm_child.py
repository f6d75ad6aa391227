"""Run by the Python of vLLM's environment: `vllm_child.py JOB ANSWER PROGRESS`.

JOB: {options: for vllm.LLM, speculative: its speculative_config, prompts, max_new_tokens, eos,
loads: numbers of requests at a time}. ANSWER: {plain, drafted: {texts, seconds, speeds: tokens a
second at each load}, drafted_tokens, accepted_tokens}.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import vllm

DRAFTED = "vllm:spec_decode_num_draft_tokens"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


def main(job_file: str, answer_file: str, progress_file: str) -> None:
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    with open(progress_file, "a", encoding="utf-8") as progress:
        plain, _ = run(job, None, progress)
        drafted, counts = run(job, job["speculative"], progress)
    answer = {
        "plain": plain,
        "drafted": drafted,
        "drafted_tokens": counts.get(DRAFTED, 0),
        "accepted_tokens": counts.get(ACCEPTED, 0),
    }
    Path(answer_file).write_text(json.dumps(answer), encoding="utf-8")


def run(job: Any, speculative: Any, progress: Any) -> tuple[dict[str, Any], dict[str, int]]:
    """Decode the prompts one by one; return texts and seconds, and the counters of drafts."""

    def decode(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        sampling = vllm.SamplingParams(
            temperature=0,
            max_tokens=tokens,
            ignore_eos=True,  # Ignores the model directory's; the job's are in the next line.
            stop_token_ids=job["eos"],
            detokenize=False,
        )
        ids = [vllm.TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        results = llm.generate(ids, sampling, use_tqdm=False)
        print(".", end="", file=progress, flush=True)
        return [list(result.outputs[0].token_ids) for result in results]

    def speed(load: int) -> float:
        """Tokens a second if `load` requests come at a time. Few prompts come several times."""
        prompts = job["prompts"] * -(-load // len(job["prompts"]))
        begin, tokens = time.perf_counter(), 0
        for first in range(0, len(prompts), load):
            texts = decode(prompts[first : first + load], job["max_new_tokens"])
            tokens += sum(map(len, texts))
        return tokens / (time.perf_counter() - begin)

    llm = vllm.LLM(**job["options"], speculative_config=speculative)
    decode(job["prompts"][:1], 4)  # warm-up
    before = counters(llm)
    begin = time.perf_counter()
    texts = [decode([prompt], job["max_new_tokens"])[0] for prompt in job["prompts"]]
    seconds = time.perf_counter() - begin
    counts = {name: count - before.get(name, 0) for name, count in counters(llm).items()}
    speeds = [speed(load) for load in job["loads"]]
    return {"texts": texts, "seconds": seconds, "speeds": speeds}, counts


def counters(llm: Any) -> dict[str, int]:
    return {m.name: m.value for m in llm.get_metrics() if m.name in (DRAFTED, ACCEPTED)}


if __name__ == "__main__":
    main(*sys.argv[1:])
