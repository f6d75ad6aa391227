"""What `benchmarks.device` measures: the models it makes, and one function for each part."""

import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common import PROMPTS, in_fresh_process, require, start_process
from benchmarks.decode import ratios as decode_ratios
from benchmarks.distill import TRL_REQUIREMENT
from benchmarks.shared.decode_contestants import Models
from benchmarks.shared.decode_measurements import Setting, hold_contest, timed
from benchmarks.shared.distill_contestants import fit, measure_training
from benchmarks.shared.distill_settings import Meter, Settings
from benchmarks.shared.process_memory import resident_memory
from benchmarks.shared.small_vocabulary import make_tokenizer
from decode.base.errors import UserError
from decode.drafters import DRAFTERS, Drafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder
from decode.model.cache.cached_model import CachedLM
from decode.model.cache_names import cache_of
from decode.model.identity import fingerprint
from decode.model.loading import Target
from decode.time_costs import measure_costs
from distill.losses import WeightedLoss
from distill.teacher.feature_sources import LiveFeatures
from heads.head_training import HeadTraining
from heads.heads_directory import make_ready, new_heads
from heads.heads_module import Heads
from heads.kinds import HEADS
from heads.options import HeadOptions
from train.base.console import Reporter
from train.data.batches import Inputs
from train.data.chat_tokens import Sample
from train.data.read import read_examples
from train.measure.check_lossless import random_llama
from train.measure.time_passes import pass_seconds, seconds_by_turns

DTYPE = torch.bfloat16
CONTEXTS, WIDTHS = (100, 1000, 4000), (1, 5, 10, 33)
PROMPT = 100  # tokens
ACCURACY = 0.8  # the share of the drafter's script that is right
# In bfloat16 far above every logit of a random model.
CERTAIN = 1e4
CONTESTANTS = ("plain", "generate", "speculative", "assisted")
BATCH = 8  # of the second contest, in which assisted generation cannot take part
ANSWERS = 64  # rows of a batch of answers, as in the recipes
EAGLE = {"type": "eagle1"}
VOCABULARY = 4096  # of the tokenizer; the models' output layers may have more rows
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@dataclass(frozen=True)
class Sizes:
    """target, drafter: fields of their configs. jobs, tokens: texts of the contest, and their
    lengths. gamma: of all loops. turns: of every timed pass. rows, steps: of a training."""

    target: dict[str, Any]
    drafter: dict[str, Any]
    jobs: int
    tokens: int
    turns: int
    rows: int
    steps: int
    gamma: int = 4

    def to_dict(self) -> dict[str, Any]:
        """Converts to JSON values."""
        return asdict(self)


def _shape(
    vocabulary: int, hidden: int, inner: int, layers: int, heads: int, keys: int
) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }


# The shape of Llama-3.2-1B, and a drafter of 0.1B.
FULL = Sizes(
    _shape(128256, 2048, 8192, 16, 32, 8),
    _shape(128256, 512, 2048, 8, 8, 2),
    jobs=4,
    tokens=128,
    turns=30,
    rows=16,
    steps=10,
)
SMALL = Sizes(
    _shape(8192, 384, 1024, 8, 6, 2),
    _shape(8192, 128, 512, 2, 4, 2),
    jobs=3,
    tokens=48,
    turns=9,
    rows=4,
    steps=4,
)


class ScriptedLlama(LlamaForCausalLM):
    """A llama that computes as usual and then says a script, whatever the text before it.

    script: int64 [max positions]; the token at position i of every text is script[i]. Without
    `position_ids` its cache tells the position, and without a cache the text is the whole one.
    """

    script: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        # A buffer, so that the packed copy of the loop shares it.
        script = torch.zeros(config.max_position_embeddings, dtype=torch.int64)
        self.register_buffer("script", script, persistent=False)

    def forward(self, *args: Any, position_ids: Tensor | None = None, **more: Any) -> Any:
        output = super().forward(*args, position_ids=position_ids, **more)
        logits = output.logits
        rows, count = logits.shape[:2]
        if position_ids is None:
            cache = cache_of(output)
            end = count if cache is None else cache.get_seq_length()
            position_ids = torch.arange(end - count, end, device=logits.device)[None]
        # Callers may ask for the logits of the last tokens only.
        following = (position_ids[:, -count:] + 1).clamp(max=len(self.script) - 1)
        tokens = self.script[following].expand(rows, -1)
        output.logits = logits.scatter(-1, tokens[..., None], CERTAIN)
        return output


@dataclass
class Bench:
    """A device, the models on it, and who reports progress."""

    device: torch.device
    sizes: Sizes
    reporter: Reporter

    @cached_property
    def tokenizer(self) -> Any:
        """A byte-level tokenizer, trained on the shipped prompts."""
        examples, _ = read_examples(str(PROMPTS / "train.jsonl"))
        texts, end = [row.prompt for row in examples if row.prompt], "<|end|>"
        return make_tokenizer(
            texts, [end], end, VOCABULARY, pad_token=end, chat_template=CHAT_TEMPLATE
        )

    def make_target(self) -> Target:
        """A target that says a script of random tokens."""
        model = random_llama(ScriptedLlama, dtype=DTYPE, device=self.device, **self.sizes.target)
        model.script.copy_(self.script())
        identity = fingerprint(self.tokenizer, model.config, model.generation_config)
        return Target(model, self.tokenizer, "random llama", None, identity, ())

    def make_drafter(self) -> LlamaForCausalLM:
        """A drafter that says the target's script, with errors."""
        model = random_llama(ScriptedLlama, dtype=DTYPE, device=self.device, **self.sizes.drafter)
        script = self.script()
        generator = torch.Generator().manual_seed(1)
        wrong = torch.rand(len(script), generator=generator) >= ACCURACY
        model.script.copy_((script + wrong) % model.config.vocab_size)
        drafter: LlamaForCausalLM = model
        return drafter

    def script(self) -> Tensor:
        """int64 [max positions]: the text of the target."""
        shape = self.sizes.target
        generator = torch.Generator().manual_seed(0)
        size = (shape["max_position_embeddings"],)
        return torch.randint(0, shape["vocab_size"], size, generator=generator)

    def prompts(self, count: int) -> list[list[int]]:
        """Prompts of random tokens."""
        generator = torch.Generator().manual_seed(2)
        ids = torch.randint(0, VOCABULARY, (count, PROMPT), generator=generator)
        prompts: list[list[int]] = ids.tolist()
        return prompts


def hold_decode_contest(bench: Bench, batch: int = 1) -> dict[str, Any]:
    """Plain and speculative decoding against `generate()`, alone and, at batch 1, assisted by the
    same drafter with the same γ. Raises UserError if a text is not the script."""
    sizes = bench.sizes
    contest = hold_contest(
        Models(bench.make_target(), bench.make_drafter()),
        Setting(sizes.jobs, sizes.tokens, batch),
        bench.prompts(sizes.jobs * batch),
        sizes.gamma,
        bench.reporter,
        CONTESTANTS if batch == 1 else CONTESTANTS[:-1],
    )
    script = bench.script()[PROMPT : PROMPT + sizes.tokens].tolist()
    for name, outputs in contest.outputs.items():
        if any(row != script for job in outputs for row in job):
            raise UserError(f"{name} emitted another text than the target's")
    values = {name: ratio["value"] for name, ratio in decode_ratios([contest]).items()}
    return {"contest": contest, "ratios": values}


@torch.no_grad()
def text_speeds(bench: Bench) -> dict[str, Any]:
    """Tokens per second of the two stages that make texts for a training: answers, sampled in one
    batch of ANSWERS, and passes that read hidden states of the same number of texts."""
    model = random_llama(dtype=DTYPE, device=bench.device, **bench.sizes.target)
    prompts, tokens = bench.prompts(ANSWERS), bench.sizes.tokens
    decoder = Decoder(model, DRAFTERS["none"](), sampling=Sampling(1.0))
    decoder.decode(prompts[:1], 2)  # the warm-up
    answering, answers = timed(bench.device, lambda: decoder.decode(prompts, tokens).outputs)
    ids = torch.tensor(
        [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)],
        device=bench.device,
    )
    source, mask = LiveFeatures(model, [model.config.num_hidden_layers - 1]), torch.ones_like(ids)
    source.features(ids[:1], mask[:1], [])  # the warm-up
    reading, _ = timed(bench.device, lambda: source.features(ids, mask, []))
    speeds = {"answers": len(prompts) * tokens / answering, "hidden states": ids.numel() / reading}
    return {"tokens_per_second": speeds}


def pass_times(bench: Bench) -> dict[str, Any]:
    """Seconds of the target's passes, by tokens before them and tokens fed."""
    lm = CachedLM(bench.make_target().model)
    seconds = {
        context: pass_seconds(lm, context, WIDTHS, turns=bench.sizes.turns) for context in CONTEXTS
    }
    values = {
        f"pass_{width}_vs_1_ctx_{context}": times[width] / times[1]
        for context, times in seconds.items()
        for width in WIDTHS[1:]
    }
    return {"seconds": seconds, "ratios": values}


@torch.no_grad()
def mixed_lengths(bench: Bench) -> dict[str, Any]:
    """Seven short texts and a long one in one batch, beside the seven in one and the long one
    alone: the seconds of a pass, and of reading all of the texts, and the memory that these take.
    The model says no script."""
    model = random_llama(dtype=DTYPE, device=bench.device, **bench.sizes.target)
    short, long = [CONTEXTS[0]] * 7, [CONTEXTS[-1]]
    widths, values = (1, bench.sizes.gamma + 1), {}
    for width in widths:
        passes = [_pass_over(model, lengths, width) for lengths in (short, long, short + long)]
        apart, alone, together = seconds_by_turns(
            passes, turns=bench.sizes.turns, device=bench.device
        )
        values[f"mixed_lengths_{width}_vs_apart"] = together / (apart + alone)
    long = [CONTEXTS[1]]
    _reading(model, short)  # packs the weights
    costs = np.array([_reading(model, lengths) for lengths in (short, long, short + long)])
    seconds, memory = (costs[2] / np.maximum(costs[0] + costs[1], 1e-9)).tolist()
    values |= {"mixed_lengths_reading_vs_apart": seconds, "mixed_lengths_memory_vs_apart": memory}
    return {"ratios": values}


def _reading(model: Any, lengths: Sequence[int]) -> tuple[float, float]:
    """The seconds of reading texts of these lengths in one batch, and the bytes that they take."""
    lm, counts = CachedLM(model), np.array(lengths)
    gc.collect()
    before, begin = resident_memory(lm.device.type), time.perf_counter()
    lm.reset(len(lengths), max(lengths))
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.int64, device=lm.device)
    lm.read(ids, np.zeros_like(counts), counts).sum().item()
    seconds = time.perf_counter() - begin
    gc.collect()
    return seconds, float(resident_memory(lm.device.type) - before)


def _pass_over(model: Any, lengths: Sequence[int], width: int) -> Callable[[], object]:
    """A pass over `width` tokens of each text, behind texts of these lengths."""
    lm, start = CachedLM(model), np.array(lengths)
    lm.reset(len(lengths), max(lengths) + width)
    ids = torch.zeros(len(lengths), width, dtype=torch.int64, device=lm.device)
    return lambda: lm.forward(ids, start)


def draft_costs(bench: Bench) -> dict[str, Any]:
    """c at the depth γ of the small LM and of an EAGLE-1 layer with init weights."""
    target = bench.make_target()
    eagle = new_heads(HeadOptions.of(EAGLE), target, None)
    make_ready(eagle, target, DTYPE)
    kind: Any = DRAFTERS["eagle1"]
    drafters: dict[str, Drafter] = {
        "small_lm": SmallLMDrafter(bench.make_drafter()),
        "eagle": kind(eagle, target.vocab_size),
    }
    gamma, prompts = bench.sizes.gamma, bench.prompts(1)
    costs = {
        name: measure_costs(
            Decoder(target.model, drafter, gamma=gamma),
            prompts,
            max_depth=gamma,
            max_width=gamma + 1,
        )
        for name, drafter in drafters.items()
    }
    values = {f"draft_cost_{name}": measured.c(gamma) for name, measured in costs.items()}
    return {"costs": costs, "ratios": values}


def train_here(bench: Bench, contestant: str) -> dict[str, Any]:
    """The figures of a training in a fresh process: ours and trl distil the drafter from the
    target, eagle1 trains a layer on the target. All read the same texts."""
    if contestant == "trl":
        require("trl", TRL_REQUIREMENT, "the comparison with TRL")
    with tempfile.TemporaryDirectory() as directory:
        paths = {name: Path(directory) / name for name in ("target", "drafter")}
        for name, path in paths.items():
            shape = getattr(bench.sizes, name)
            random_llama(dtype=DTYPE, device=bench.device, **shape).save_pretrained(path)
            bench.tokenizer.save_pretrained(path)
        settings = Settings(
            target=str(paths["target"]),
            student=str(paths["drafter"]),
            device=bench.device.type,
            precision="bf16",
            rows=bench.sizes.rows,
            steps=bench.sizes.steps,
        )
        function = "distill_contestants:measure"
        if contestant in HEADS:
            function = "device_parts:measure_heads"
        figures: dict[str, Any] = in_fresh_process(
            f"benchmarks.shared.{function}", contestant=contestant, settings=asdict(settings)
        )
    return figures


def measure_heads(contestant: str, settings: dict[str, Any]) -> dict[str, Any]:
    """As `benchmarks.shared.distill_contestants.measure`, for a kind of heads on the target."""
    start_process()
    options = Settings(**settings)
    target = options.load()
    heads = new_heads(HeadOptions.of({"type": contestant}), target, None).to(target.device)
    return measure_training(contestant, train_heads, target, heads, options)


def train_heads(
    contestant: str,
    target: Target,
    heads: Heads,
    texts: Sequence[Sample],
    settings: Settings,
    meter: Meter,
) -> None:
    """Train one epoch as `train.stages.heads` does, without writing a drafter directory."""
    heads.borrow(target.model)
    losses = WeightedLoss({"forward_kl": 1.0})
    training = HeadTraining(heads, losses, target.model)
    source = LiveFeatures(target.model, training.captured_layers)
    weights = heads.loss_weights(0.0)

    def step(module: nn.Module, batch: Inputs, names: Sequence[str]) -> tuple[Tensor, Tensor]:
        meter.count_batch(batch["attention_mask"], batch["loss_mask"][:, 1:])
        features = source.features(batch["input_ids"], batch["attention_mask"], names)
        return module(batch["input_ids"], batch["loss_mask"], features, weights)

    fit(
        training,
        step,
        training.sums,
        target,
        texts,
        settings,
        meter,
        figures=training.figures,
    )
