"""A small LM as a plain Hugging Face directory: transformers, vLLM, SGLang, MLX-LM."""

from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar

import transformers

from decode.base.errors import UserError
from decode.drafters import Drafter
from decode.drafters.pard import mark_parallel, stored_mask_token
from decode.model.identity import require_same_vocabulary
from decode.model.loading import DTYPES, Target, load_model_and_tokenizer
from draftsmith.export.file_schema import is_count, is_id, key_problems, read_json
from draftsmith.export.formats import FORMATS, ExportJob, Format, ImportJob, Restored
from draftsmith.export.formats.published_keys import unread_by_transformers
from draftsmith.export.formats.published_layer import mask_problems
from draftsmith.export.model_directory import for_older_readers, model_problems, older_names
from draftsmith.export.published import Checkpoint
from draftsmith.export.trained_drafter import load_small_lm
from heads.mtp_checkpoint import has_module

# Keys of configs of models that draft in another way than a small LM: other formats read them.
OTHER_DRAFTERS = {
    "speculators_model_type",
    "dflash_config",
    "markov_rank",
    "pard_token",
    "spd_type",
}


class HuggingFace(Format):
    """config.json, model.safetensors, the tokenizer, and a generation_config.json that makes
    transformers draft a constant γ tokens. Its default is 20 tokens, stopped early by confidence.
    """

    name = "hf"
    kinds: ClassVar[tuple[str, ...]] = ("small_lm",)
    vllm: ClassVar[dict[str, Any] | None] = {"method": "draft_model"}
    sglang: ClassVar[str | None] = "STANDALONE"

    def write(self, job: ExportJob, directory: Path) -> dict[str, Any]:
        source = job.drafter.small_lm(job.target)
        dtype = job.dtype or source.dtype
        model = source.model.to(DTYPES[dtype])
        config: Any = model.config
        # Do not copy the target's sampling defaults to the drafter.
        model.generation_config = transformers.GenerationConfig(
            bos_token_id=config.bos_token_id,
            eos_token_id=model.generation_config.eos_token_id,
            pad_token_id=config.pad_token_id,
            num_assistant_tokens=job.gamma,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0,
        )
        model.save_pretrained(directory)
        source.tokenizer.save_pretrained(directory)
        for_older_readers(directory, dtype)
        return {
            "dtype": dtype,
            "kept": source.reduced_to,
            "filled_from": source.filled_from,
            "parameters": sum(p.numel() for p in {id(p): p for p in model.parameters()}.values()),
            "size": f"{config.model_type}, {config.num_hidden_layers} layers",
        }

    def problems(self, directory: Path) -> list[str]:
        generation = read_json(directory / "generation_config.json")
        drafting = {
            "num_assistant_tokens": is_count,
            "num_assistant_tokens_schedule": "constant",
            "assistant_confidence_threshold": 0.0,
        }
        problems = key_problems(drafting, generation or {}, "generation_config.json")
        config = read_json(directory / "config.json") or {}
        legacy_names: dict[str, Any] = {"torch_dtype": config.get("dtype")}
        legacy_names |= older_names(config)
        problems += key_problems(legacy_names, config, "config.json")
        return problems + model_problems(directory)

    def reload(self, directory: Path, target: Target) -> Drafter:
        return load_small_lm(directory, target)

    def recognises(self, checkpoint: Checkpoint) -> bool:
        """Any causal language model that is not a drafter of another kind, and has no drafter in
        it."""
        if not is_model(checkpoint) or OTHER_DRAFTERS & checkpoint.config.keys():
            return False
        return not has_module(checkpoint.config, checkpoint.names)

    def restored(self, job: ImportJob) -> Restored:
        target, checkpoint = job.target, job.checkpoint
        if job.depth is not None:
            raise UserError(
                f"--depth is {job.depth}, but a small LM drafts to any depth; leave it out"
            )
        checkpoint.require_no_code()
        loaded = load_model_and_tokenizer(
            str(checkpoint.directory), dtype=checkpoint.dtype, device="cpu"
        )
        what = f"drafter {checkpoint.source}"
        require_same_vocabulary(loaded.fingerprint, target.fingerprint, what, padding=True)

        self.require_drafting(loaded.model.config, job)

        def write(directory: Path) -> None:
            loaded.model.save_pretrained(directory)
            loaded.tokenizer.save_pretrained(directory)

        return Restored(self.kinds[0], write, notes=key_notes(job))

    def require_drafting(self, config: Any, job: ImportJob) -> None:
        """Raise UserError if a published model's config lacks what this kind of drafter reads."""

    def serving(self, target: str, repository: str, gamma: int) -> list[tuple[str, str, str]]:
        return [
            (
                "transformers",
                "python",
                f'assistant = AutoModelForCausalLM.from_pretrained("{repository}")\n'
                "target.generate(**inputs, assistant_model=assistant)\n"
                f"# γ = {gamma} comes from generation_config.json; to change it:\n"
                f"assistant.generation_config.num_assistant_tokens = {gamma}",
            ),
            *super().serving(target, repository, gamma),
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


class ParallelHuggingFace(HuggingFace):
    """The same for a drafter that drafts in one pass (PARD, 2504.18583): its config also has the
    mask token, as `pard_token`, and `spd_type`. Other readers than vLLM would let it draft one
    token after the other, and it was not trained to do that alone."""

    name = "pard"
    kinds = ("pard",)
    vllm = {"method": "draft_model", "parallel_drafting": True}
    sglang = None

    def problems(self, directory: Path) -> list[str]:
        config = read_json(directory / "config.json") or {}
        rows = config.get("vocab_size", 0)
        mask = {"pard_token": lambda x: is_id(x) and x < rows, "spd_type": "pard"}
        return key_problems(mask, config, "config.json") + super().problems(directory)

    def recognises(self, checkpoint: Checkpoint) -> bool:
        """A causal language model whose config has a mask token."""
        return is_model(checkpoint) and "pard_token" in checkpoint.config

    def require_drafting(self, config: Any, job: ImportJob) -> None:
        token = stored_mask_token(config)
        if token is None:
            raise UserError(
                "the model's config has no pard_token, the id of the mask token of a drafter that "
                "drafts in one pass; import it with --format hf"
            )
        job.require(mask_problems("pard_token", token, job.target), self.name)
        mark_parallel(config, token)

    def serving(self, target: str, repository: str, gamma: int) -> list[tuple[str, str, str]]:
        return Format.serving(self, target, repository, gamma)  # not those of a small LM


def key_notes(job: ImportJob, read: Collection[str] = OTHER_DRAFTERS) -> list[str]:
    """Notes on the keys of a complete model's config that transformers does not know: other readers
    may. read: those that the format itself reads."""
    unread = set(unread_by_transformers(job.checkpoint.config)) - {*read} - job.ignored
    if not unread:
        return []
    return [f"its config has {', '.join(sorted(unread))}, which transformers does not read"]


def is_model(checkpoint: Checkpoint) -> bool:
    """Whether a published drafter is a causal language model, and not a layer on its target."""
    names = checkpoint.config.get("architectures") or [""]
    is_layer = any(name.removeprefix("model.") == "fc.weight" for name in checkpoint.names)
    return str(names[0]).endswith(("ForCausalLM", "LMHeadModel")) and not is_layer


FORMATS.register("hf")(HuggingFace())
FORMATS.register("pard")(ParallelHuggingFace())
