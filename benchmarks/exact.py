"""Measures what it costs that chains have the exact bits of plain decoding, and checks the texts.

    python -m benchmarks.exact [--drafter NAME|DIRECTORY …] [--quick] [--json FILE]
                               [--target T] [--dtype D] [--gamma N] [--prompts FILE] [--tokens N]

The first measurement times the attention of one layer, ours (`lean_forward`) and transformers'
`sdpa`, in turns, on tensors of the target's shapes. The difference times the number
of layers is given as a share of a full pass. The second measurement compares the greedy texts of
each drafter, in chains, with those of plain decoding. CPU only.
"""

from typing import Annotated, Any

import torch
import typer
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import heads  # noqa: F401  (registers its drafters)
from benchmarks.common import (
    PROMPTS,
    TARGET,
    JsonOption,
    PromptsOption,
    TargetOption,
    describe_machine,
    run_command,
    start_benchmark,
    write_json,
)
from decode.drafters import DRAFTERS
from decode.drafters.trained import ShapedDrafter
from decode.loop.decoding import Decoder
from decode.measure.same_text import identical
from decode.measure.time_passes import pass_seconds, seconds_by_turns
from decode.model.cache.cached_model import CachedLM
from decode.model.cache.slots import round_up_slots
from decode.model.forward.attention_mask import SLOT_STEP, AttentionMask
from decode.model.loading import Target, load_target
from decode.opening.directory import open_drafter
from decode.shapes import Chain
from draftsmith.cli.command import tokenized_prompts
from train.data.read import read_examples

CONTEXTS = (100, 1000, 4000)
FED = (1, 3, 5, 9)  # tokens of a pass: plain decoding, and chains of 2, 4 and 8


def main(
    drafter: Annotated[list[str] | None, typer.Option(help="name or directory; repeatable")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="fewer prompts")] = False,
    json_file: JsonOption = None,
    target: TargetOption = TARGET,
    dtype: Annotated[str, typer.Option(help="dtype of all models")] = "fastest",
    gamma: Annotated[int, typer.Option(min=1, help="depth of the chains")] = 4,
    prompts: PromptsOption = PROMPTS / "test.jsonl",
    tokens: Annotated[int, typer.Option(min=2, help="tokens of each text")] = 48,
) -> None:
    """Measure the cost of equal bits, and count equal texts."""
    reporter = start_benchmark()
    loaded = load_target(target, dtype=dtype, device="cpu")
    costs = [cost for context in CONTEXTS for cost in measure_costs(loaded, context, quick=quick)]
    for cost in costs:
        reporter.say(
            f"text {cost['context']}, fed {cost['fed']}: {cost['pass_ms']:.1f} ms a pass; "
            f"attention {cost['ours_us']:.0f} µs a layer, sdpa {cost['sdpa_us']:.0f} µs: "
            f"{cost['share_of_pass']:+.1%} of the pass"
        )
    examples = read_examples(str(prompts))[0][:: 6 if quick else 1]
    texts = tokenized_prompts(examples, loaded, None)
    shares = {}
    if drafter:
        shares = equal_shares(loaded, drafter, texts, gamma=gamma, tokens=tokens)
    for name, share in shares.items():
        reporter.say(f"{name}: {share:.1%} of {len(texts)} greedy texts equal plain decoding's")
    if json_file is not None:
        ratios = {f"share_{c['fed']}_at_{c['context']}": c["share_of_pass"] for c in costs}
        ratios |= {f"identical_{name}": share for name, share in shares.items()}
        process = describe_machine()
        write_json(
            json_file,
            {"benchmark": "exact", "process": process, "costs": costs, "ratios": ratios},
        )


def measure_costs(target: Target, context: int, *, quick: bool) -> list[dict[str, Any]]:
    """Return a row for each number of tokens fed in a pass. context: tokens of text before them."""
    config = target.model.config.get_text_config()
    queries, layers = config.num_attention_heads, config.num_hidden_layers
    shared = getattr(config, "num_key_value_heads", None) or queries
    size = getattr(config, "head_dim", None) or config.hidden_size // queries
    module = nn.Module()
    module.num_key_value_groups = queries // shared
    generator = torch.Generator().manual_seed(0)
    slots = round_up_slots(context + max(FED), SLOT_STEP)
    keys, values = torch.randn(2, 1, shared, slots, size, generator=generator).to(target.dtype)
    turns = 5 if quick else 15
    pass_s = pass_seconds(CachedLM(target.model), context, FED, turns=turns)
    rows = []
    with torch.inference_mode():
        for fed in FED:
            query = torch.randn(1, queries, fed, size, generator=generator).to(target.dtype)
            padded = round_up_slots(context + fed, SLOT_STEP)
            seen = torch.arange(padded) <= context + torch.arange(fed)[:, None]
            chain = AttentionMask(seen[None, None], target.dtype, chain=True)
            length = context + fed
            boolean = seen[None, None, :, :length] if fed > 1 else None

            def ours(
                query: Any = query, chain: AttentionMask = chain, padded: int = padded
            ) -> None:
                chain.attend(query, keys[:, :, :padded], values[:, :, :padded], size**-0.5)

            def sdpa(query: Any = query, mask: Any = boolean, length: int = length) -> None:
                sdpa_attention_forward(
                    module, query, keys[:, :, :length], values[:, :, :length], mask
                )

            ours_s, sdpa_s = seconds_by_turns([ours, sdpa], turns=turns, calls=20)
            rows.append(
                {
                    "context": context,
                    "fed": fed,
                    "pass_ms": 1e3 * pass_s[fed],
                    "ours_us": 1e6 * ours_s,
                    "sdpa_us": 1e6 * sdpa_s,
                    "share_of_pass": layers * (ours_s - sdpa_s) / pass_s[fed],
                }
            )
    return rows


def equal_shares(
    target: Target, drafters: list[str], prompts: list[list[int]], *, gamma: int, tokens: int
) -> dict[str, float]:
    """Return, by drafter, the share of greedy texts (at batch 1) that equal plain decoding's."""
    plain = Decoder(target.model, DRAFTERS["none"](), eos_token_ids=target.eos_token_ids)
    texts = [plain.decode([prompt], tokens).outputs[0] for prompt in prompts]
    shares = {}
    for name in drafters:
        drafter = open_drafter(name, target)
        if isinstance(drafter, ShapedDrafter):
            drafter = drafter.with_shape(Chain())
        decoder = Decoder(target.model, drafter, gamma=gamma, eos_token_ids=target.eos_token_ids)
        drafted = [decoder.decode([prompt], tokens).outputs[0] for prompt in prompts]
        shares[name], _ = identical(target, prompts, texts, drafted)
    return shares


if __name__ == "__main__":
    run_command(main)
