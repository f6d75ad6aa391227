#!/usr/bin/env bash
# Versions: transformers 5.24.0, torch 2.13.0
# Behaviour: `generate` that samples with an assistant of another tokenizer draws from another law than the model's. The
#   assistant's logits stand in the order of a hash map, another one in each run, and are read as if in that of its ids.
# Guess: the model's law, as with an assistant of the same tokenizer: the paper that it follows is one on lossless drafts.
# Seen:
#   no assistant: first tokens 0.02 from the model's law
#   an assistant of the same tokenizer: first tokens 0.03 from the model's law
#   an assistant of another tokenizer: first tokens 0.37 from the model's law
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 torch==2.13.0 numpy==2.4.6 || exit 2
"$folder/venv/bin/python" - <<'END'
import sys

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

DRAWS = 1000


def words(names: list[str]) -> PreTrainedTokenizerFast:
    model = models.WordLevel({name: index for index, name in enumerate(names)}, unk_token=names[0])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=names[0])


def llama(seed: int, tokens: int = 12) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=tokens, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, initializer_range=0.5,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )).eval()


def apart(law: torch.Tensor, **assistant) -> float:
    """Half of the summed distance between the law and the first tokens of DRAWS texts."""
    torch.manual_seed(0)
    counts = torch.zeros(12)
    for _ in range(DRAWS):
        text = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0,
            max_new_tokens=4, **assistant,
        )
        counts[text[0, ids.shape[1]]] += 1
    return ((counts / DRAWS - law).abs().sum() / 2).item()


# Eight words that both have, and five of the assistant's own among them.
names = [f"w{i}" for i in range(12)]
other = [f"v{i // 3}" if i % 3 == 2 else f"w{i}" for i in reversed(range(12))] + ["v4"]
target, assistant = words(names), words(other)
model = llama(0)
ids = target("w1 w3 w4 w6", add_special_tokens=False, return_tensors="pt")["input_ids"]
law = model(ids).logits[0, -1].softmax(-1).detach()
seen = {
    "no assistant": apart(law),
    "an assistant of the same tokenizer": apart(law, assistant_model=llama(1)),
    "an assistant of another tokenizer": apart(
        law, assistant_model=llama(1, 13), tokenizer=target, assistant_tokenizer=assistant
    ),
}
for name, distance in seen.items():
    print(f"{name}: first tokens {distance:.2f} from the model's law")
none, same, another = seen.values()
sys.exit(0 if max(none, same) < 0.08 and another > 0.12 else 1)
END
