#!/usr/bin/env bash
# Versions: trl 1.16.0, transformers 5.23.0, torch 2.13.0
# Behaviour: with lmbda 1, GKD's loss is the sum over the tokens that the student wrote, divided by the number of tokens
#   in the answers of the data set, which it does not train on. The same texts give 21 times the loss
#   where the data set answers with 2 tokens in place of 41.
# Guess: on-policy training reads the prompts only. Short or missing answers in the data set change nothing.
# Seen:
#   answers of 2 tokens in the data set: loss 0.0604
#   answers of 41 tokens in the data set: loss 0.0029
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet trl==1.16.0 transformers==5.23.0 torch==2.13.0 numpy==2.4.6 || exit 2
"$folder/venv/bin/python" - <<'END'
import sys
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl.experimental.gkd import GKDConfig, GKDTrainer

words = ["<pad>", "<end>", "<user>", "<answer>"] + [f"w{i}" for i in range(60)]
core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<end>")
tokenizer.chat_template = (
    "{% for turn in messages %}"
    "{{ ' <user> ' if turn.role == 'user' else ' <answer> ' }}{{ turn.content }}"
    "{{ '' if turn.role == 'user' else ' <end>' }}"
    "{% endfor %}{{ ' <answer> ' if add_generation_prompt else '' }}"
)


def model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def first_loss(answer_words: int) -> float:
    turns = [
        {"role": "user", "content": "w1 w2 w3"},
        {"role": "assistant", "content": " ".join(["w4"] * answer_words)},
    ]
    with tempfile.TemporaryDirectory() as folder:
        settings = GKDConfig(
            output_dir=folder, lmbda=1.0, max_steps=1, per_device_train_batch_size=2, logging_steps=1,
            max_new_tokens=40, max_length=256, use_cpu=True, bf16=False, report_to="none",
            disable_tqdm=True, save_strategy="no", seed=1,
        )
        trainer = GKDTrainer(
            model=model(1), teacher_model=model(2), args=settings, processing_class=tokenizer,
            train_dataset=Dataset.from_list([{"messages": turns}] * 2),
        )
        trainer.train()
        return float(trainer.state.log_history[0]["loss"])


losses = {count: first_loss(count) for count in (1, 40)}
for count, loss in losses.items():
    print(f"answers of {count + 1} tokens in the data set: loss {loss:.4f}")
sys.exit(0 if losses[1] > 10 * losses[40] else 1)
END
