"""A small server over an engine that is a library.

`library_server.py KIND TARGET DRAFTER GAMMA ENDS PORT`, by the Python that has the library. ENDS:
the end-of-text tokens, as JSON. It answers `/v1/completions` one text at a time, with token ids,
and `/metrics` with the drafts so far. What the library says of a text is its tokens only, so its
streams and stop strings are those of this server and say nothing about the library.
"""

import json
import sys
import tempfile
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

# Of a prompt, a number of tokens, a temperature and a seed.
Decode = Callable[[list[int], int, float, int], list[int]]
# (drafted, accepted) tokens so far.
Counts = list[int]


def transformers_decode(
    target: str, drafter: str, gamma: int, ends: list[int], counts: Counts
) -> tuple[Decode, Any]:
    """drafter: the directory of an assistant, `lookup`, `mtp` or `none`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.generation.candidate_generator import AssistedCandidateGenerator

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    # Nothing of the checkpoint's own is filled in: no penalty, no length.
    model.generation_config = GenerationConfig(
        eos_token_id=ends or None, pad_token_id=ends[0] if ends else None
    )
    drafts: dict[str, Any] = {
        "none": {},
        "lookup": {"prompt_lookup_num_tokens": gamma},
        "mtp": {"use_mtp": True},
    }
    # (start, tokens) of each draft of a text: transformers counts none itself.
    made: list[tuple[int, list[int]]] = []
    original = AssistedCandidateGenerator.get_candidates

    def recording(self: Any, input_ids: Any, **options: Any) -> Any:
        candidates = original(self, input_ids, **options)
        begin = input_ids.shape[1]
        made.append((begin, candidates[0][0, begin:].tolist()))
        return candidates

    AssistedCandidateGenerator.get_candidates = recording
    if drafter not in drafts:
        assistant = AutoModelForCausalLM.from_pretrained(drafter, dtype=torch.float32).eval()
        assistant.generation_config.num_assistant_tokens = gamma
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.assistant_confidence_threshold = 0.0
        drafts[drafter] = {"assistant_model": assistant}

    def decode(prompt: list[int], tokens: int, temperature: float, seed: int) -> list[int]:
        torch.manual_seed(seed)
        drawn = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        ids = torch.tensor([prompt])
        text = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens,
            do_sample=bool(temperature), **drawn, **drafts[drafter],
        )  # fmt: skip
        ids = text[0].tolist()
        for number, (begin, draft) in enumerate(made):
            following = ids[begin:]
            # The last draft counts up to the end of the text.
            within = draft[: len(following)] if number == len(made) - 1 else draft
            pairs = enumerate(zip(within, following, strict=False))
            right = next((i for i, (one, two) in pairs if one != two), None)
            counts[0] += len(within)
            counts[1] += min(len(within), len(following)) if right is None else right
        made.clear()
        return list(ids[len(prompt) :])

    return decode, AutoTokenizer.from_pretrained(target)


# Architectures of exported heads, and the classes of OpenVINO's converter that read them.
OPENVINO_HEADS = {
    "LlamaForCausalLMEagle3": "LlamaEagle3ForCausalLM",
    "DFlashDraftModel": "Qwen3DFlashForCausalLM",
}


def openvino_converted(source: str, directory: Path, target: str) -> str:
    """Write a model, or heads on `target`, in OpenVINO's format with the target's tokenizer, and
    return the directory."""
    import openvino
    from openvino_tokenizers import convert_tokenizer
    from optimum.exporters.openvino import export_from_model, model_patcher
    from optimum.intel import OVModelForCausalLM
    from transformers import AutoConfig, AutoTokenizer

    architecture = (AutoConfig.from_pretrained(source).architectures or [""])[0]
    if architecture in OPENVINO_HEADS:
        reader = getattr(model_patcher, OPENVINO_HEADS[architecture])
        # A class of this module: of one of optimum's the converter asks what it wraps.
        kind: Any = type("Heads", (reader,), {})
        heads = kind.from_pretrained(source, dtype="float32")
        heads.config.architectures = [architecture]
        export_from_model(heads, output=directory, task="text-generation-with-past")
    else:
        model = OVModelForCausalLM.from_pretrained(
            source, export=True, compile=False, load_in_8bit=False, dtype="float32"
        )
        model.save_pretrained(directory)
    if architecture == "LlamaForCausalLMEagle3":
        openvino_name_layers(directory, AutoConfig.from_pretrained(target).num_hidden_layers)
    parts = convert_tokenizer(AutoTokenizer.from_pretrained(target), with_detokenizer=True)
    for part, what in zip(parts, ("tokenizer", "detokenizer"), strict=True):
        openvino.save_model(part, directory / f"openvino_{what}.xml")
    return str(directory)


def openvino_name_layers(directory: Path, layers: int) -> None:
    """Write the target's layers whose outputs EAGLE-3 reads into a converted model. Without them
    OpenVINO takes the outputs of 2, n // 2 and n − 3, of which other engines take the inputs."""
    import openvino

    config = json.loads((directory / "config.json").read_text("utf-8"))
    inputs = config.get("eagle_aux_hidden_state_layer_ids", (2, layers // 2, layers - 3))
    core = openvino.Core()
    core.set_property({"ENABLE_MMAP": False})  # the file is written again
    file = directory / "openvino_model.xml"
    model = core.read_model(file)
    model.set_rt_info([number - 1 for number in inputs], "hidden_layers_list")
    openvino.save_model(model, file, compress_to_fp16=False)


def openvino_decode(
    target: str, drafter: str, gamma: int, ends: list[int], counts: Counts
) -> tuple[Decode, Any]:
    """drafter: a model directory, `lookup` or `none`."""
    import numpy as np
    import openvino
    import openvino_genai
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    place = Path(tempfile.mkdtemp())
    precision = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    converted = openvino_converted(target, place / "target", target)
    scheduling = openvino_genai.SchedulerConfig()
    scheduling.cache_size, scheduling.enable_prefix_caching = 1, False
    options: dict[str, Any] = {"prompt_lookup": True} if drafter == "lookup" else {}
    if Path(drafter).exists():
        heads = openvino_converted(drafter, place / "drafter", target)
        options = {"draft_model": openvino_genai.draft_model(heads, "CPU", **precision)}
    pipeline = openvino_genai.LLMPipeline(
        converted, "CPU", scheduler_config=scheduling, **precision, **options
    )

    def decode(prompt: list[int], tokens: int, temperature: float, seed: int) -> list[int]:
        settings = openvino_genai.GenerationConfig()
        settings.max_new_tokens, settings.stop_token_ids = tokens, set(ends)
        if options:
            settings.num_assistant_tokens = gamma
        if "prompt_lookup" in options:
            settings.max_ngram_size = 3
        settings.do_sample = bool(temperature)
        if temperature:
            settings.temperature, settings.rng_seed = temperature, seed
            settings.top_p, settings.top_k = 1.0, len(tokenizer)
        ids = np.array([prompt], dtype=np.int64)
        tensors = openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids))
        result = pipeline.generate(openvino_genai.TokenizedInputs(*tensors), settings)
        if options:
            found = result.extended_perf_metrics
            # The first says 0 of DFlash's drafts.
            counts[0] += found.get_num_draft_tokens() or found.get_num_draft_processed_tokens()
            counts[1] += found.get_num_accepted_tokens()
        return list(result.tokens[0])

    return decode, tokenizer


def handler(
    decode: Decode, tokenizer: Any, kind: str, ends: list[int], counts: Counts
) -> type[BaseHTTPRequestHandler]:
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path == "/metrics":
                names = zip(("draft", "accepted"), counts, strict=True)
                lines = [f"{kind}:spec_decode_num_{name}_tokens_total {n}\n" for name, n in names]
                self._reply(200, "".join(lines))
                return
            known = {"/health": {}, "/v1/models": {"data": [{"id": "library"}]}}
            self._reply(200 if self.path in known else 404, json.dumps(known.get(self.path)))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if self.path != "/v1/completions":
                self._reply(404, "{}")
                return
            with lock:
                choices = [
                    _choice(decode, tokenizer, ends, body, i) for i in range(body.get("n", 1))
                ]
            reply = json.dumps({"choices": choices})
            self._reply(200, f"data: {reply}\n\ndata: [DONE]\n\n" if body["stream"] else reply)

        def _reply(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            return None

    return Handler


def _choice(
    decode: Decode, tokenizer: Any, ends: list[int], body: dict[str, Any], number: int
) -> dict[str, Any]:
    seed = (body["seed"] + number * 7919) % 2**31
    tokens = decode(body["prompt"], body["max_tokens"], body["temperature"], seed)
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    ended = bool(tokens) and tokens[-1] in ends
    for stop in body.get("stop", ()):
        if stop in text:
            text, ended = text[: text.index(stop)], True
    reason = "stop" if ended or len(tokens) < body["max_tokens"] else "length"
    return {"text": text, "token_ids": tokens, "finish_reason": reason}


def main(kind: str, target: str, drafter: str, gamma: str, ends_of_texts: str, port: str) -> None:
    making = {"transformers": transformers_decode, "openvino": openvino_decode}[kind]
    ends, counts = json.loads(ends_of_texts), [0, 0]
    decode, tokenizer = making(target, drafter, int(gamma), ends, counts)
    handling = handler(decode, tokenizer, kind, ends, counts)
    ThreadingHTTPServer(("127.0.0.1", int(port)), handling).serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
