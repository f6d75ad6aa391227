"""A small LM as a plain Hugging Face directory: transformers, vLLM, SGLang, MLX-LM."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from decode.drafters import Drafter
from decode.target.loading import DTYPES, Target
from train.export.formats import FORMATS, ExportJob, Format
from train.export.source import load_small_lm, read_small_lm
from train.export.tensors import (
    DTYPE_NAMES,
    TensorSpec,
    key_problems,
    number,
    read_json,
    safetensors_found,
    tensor_problems,
    whole,
)


class HuggingFace(Format):
    """config.json, model.safetensors, the tokenizer, and a generation_config.json that makes
    transformers draft a constant γ tokens. Its default is 20 tokens, stopped early by confidence.
    """

    name = "hf"
    kinds = ("small_lm",)
    engines = ("transformers", "vllm", "sglang", "mlx", "openvino")

    def refuse(self, job: ExportJob) -> None:
        return None

    def write(self, job: ExportJob, directory: Path) -> dict[str, Any]:
        source = read_small_lm(job.drafter, job.target)
        dtype = job.dtype or source.dtype
        model = source.model.to(DTYPES[dtype])
        # Do not copy the target's sampling defaults to the drafter.
        model.generation_config = transformers.GenerationConfig(
            bos_token_id=source.config.bos_token_id,
            eos_token_id=source.model.generation_config.eos_token_id,
            pad_token_id=source.config.pad_token_id,
            num_assistant_tokens=job.gamma,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0,
        )
        model.save_pretrained(directory)
        source.tokenizer.save_pretrained(directory)
        for_older_readers(directory, dtype)
        return {
            "dtype": dtype,
            "kept": source.kept,
            "filled_from": source.filled_from,
            "parameters": sum(p.numel() for p in {id(p): p for p in model.parameters()}.values()),
            "size": f"{source.config.model_type}, {source.config.num_hidden_layers} layers",
        }

    def problems(self, directory: Path) -> list[str]:
        generation = read_json(directory / "generation_config.json")
        drafting = {
            "num_assistant_tokens": whole,
            "num_assistant_tokens_schedule": "constant",
            "assistant_confidence_threshold": 0.0,
        }
        problems = key_problems(drafting, generation or {}, "generation_config.json")
        config = read_json(directory / "config.json") or {}
        older: dict[str, Any] = {"torch_dtype": config.get("dtype")}
        if "rope_parameters" in config:
            older["rope_theta"] = number
        return problems + key_problems(older, config, "config.json") + model_problems(directory)

    def reload(self, directory: Path, target: Target) -> Drafter:
        return load_small_lm(directory, target)

    def serving(self, target: str, repository: str, gamma: int) -> list[tuple[str, str, str]]:
        speculative = json.dumps(
            {"method": "draft_model", "model": repository, "num_speculative_tokens": gamma}
        )
        return [
            (
                "transformers",
                "python",
                f'assistant = AutoModelForCausalLM.from_pretrained("{repository}")\n'
                "target.generate(**inputs, assistant_model=assistant)\n"
                f"# γ = {gamma} comes from generation_config.json; to change it:\n"
                f"assistant.generation_config.num_assistant_tokens = {gamma}",
            ),
            ("vLLM", "", f"vllm serve {target} --speculative-config '{speculative}'"),
            (
                "SGLang",
                "",
                f"python -m sglang.launch_server --model {target} \\\n"
                "  --speculative-algorithm STANDALONE \\\n"
                f"  --speculative-draft-model-path {repository} \\\n"
                f"  --speculative-num-steps {gamma} --speculative-eagle-topk 1 \\\n"
                f"  --speculative-num-draft-tokens {gamma + 1}",
            ),
            (
                "MLX-LM",
                "",
                f"mlx_lm.generate --model {target} --draft-model {repository} "
                f"--num-draft-tokens {gamma}",
            ),
            (
                "OpenVINO GenAI",
                "python",
                f"# first: optimum-cli export openvino --model {repository} drafter-ov\n"
                f"#        optimum-cli export openvino --model {target} target-ov\n"
                'drafter = openvino_genai.draft_model("drafter-ov", "CPU")\n'
                'pipeline = openvino_genai.LLMPipeline("target-ov", "CPU", draft_model=drafter)\n'
                f"pipeline.generate(prompt, max_new_tokens=100, num_assistant_tokens={gamma})",
            ),
        ]


FORMATS.register("hf")(HuggingFace())


def model_problems(directory: Path) -> list[str]:
    """Return the problems that keep a directory from being a complete causal language model with
    its tokenizer."""
    config = read_json(directory / "config.json")
    if config is None:
        return ["config.json is missing or no JSON"]
    problems = key_problems(
        {
            "architectures": lambda x: (
                isinstance(x, list)
                and len(x) == 1
                and str(x[0]).endswith(("ForCausalLM", "LMHeadModel"))
            ),
            "model_type": lambda x: x in transformers.CONFIG_MAPPING,
            "vocab_size": whole,
            "dtype": lambda x: x in DTYPE_NAMES,
        },
        config,
        "config.json",
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if read_json(directory / name) is None:
            problems.append(f"{name} is missing or no JSON")
    if problems:
        return problems
    found, unreadable = safetensors_found(sorted(directory.glob("*.safetensors")))
    expected = expected_tensors(directory, DTYPE_NAMES[config["dtype"]])
    return unreadable + tensor_problems(expected, found)


def expected_tensors(directory: Path, dtype: str) -> dict[str, TensorSpec]:
    """Return the tensors that a directory's config requires, according to the model's class. Tied
    tensors are stored once."""
    config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    tied = model.all_tied_weights_keys if config.tie_word_embeddings else {}
    return {
        name: TensorSpec(tuple(tensor.shape), (dtype,))
        for name, tensor in model.state_dict().items()
        if name not in tied
    }


def for_older_readers(directory: Path, dtype: str) -> None:
    """Add to a model directory the names that transformers 4 and engines built on it need."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    # This is an old name of the target. It says nothing about the drafter.
    config.pop("_model_name_or_path", None)
    config["dtype"] = config["torch_dtype"] = dtype
    theta = (config.get("rope_parameters") or {}).get("rope_theta")
    if theta is not None:
        config["rope_theta"] = theta
    file.write_text(json.dumps(config, indent=2))
    file = directory / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    for local in ("is_local", "local_files_only"):
        settings.pop(local, None)
    file.write_text(json.dumps(settings, indent=2))
