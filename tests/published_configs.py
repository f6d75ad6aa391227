"""Shapes of published models, as their `config.json` states them."""

from typing import Any


def _llama(model_type: str, *shape: int, **more: Any) -> dict[str, Any]:
    """shape: hidden size, size inside the MLP, layers, heads, key heads, output rows."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "vocab_size")
    sizes = dict(zip(names, shape, strict=True))
    return {"model_type": model_type, "tie_word_embeddings": False, **sizes, **more}


PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-8B": _llama("qwen3", 4096, 12288, 36, 32, 8, 151936, head_dim=128),
    "Qwen/Qwen3-0.6B": _llama(
        "qwen3", 1024, 3072, 28, 16, 8, 151936, head_dim=128, tie_word_embeddings=True
    ),
    "Qwen/Qwen2.5-7B-Instruct": _llama("qwen2", 3584, 18944, 28, 28, 4, 152064),
    "Qwen/Qwen2.5-0.5B-Instruct": _llama(
        "qwen2", 896, 4864, 24, 14, 2, 151936, tie_word_embeddings=True
    ),
    "meta-llama/Llama-3.1-8B-Instruct": _llama("llama", 4096, 14336, 32, 32, 8, 128256),
    "meta-llama/Llama-3.3-70B-Instruct": _llama("llama", 8192, 28672, 80, 64, 8, 128256),
    "Qwen/Qwen3-30B-A3B": _llama(
        "qwen3_moe",
        *(2048, 6144, 48, 32, 4, 151936),
        head_dim=128,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
    ),
    "Qwen/Qwen3.5-9B": {
        "model_type": "qwen3_5",
        "tie_word_embeddings": False,
        "text_config": _llama(
            "qwen3_5_text",
            *(4096, 12288, 32, 16, 4, 248320),
            head_dim=256,
            mtp_num_hidden_layers=1,
        ),
    },
    "openai/gpt-oss-20b": _llama(
        "gpt_oss",
        *(2880, 2880, 24, 64, 8, 201088),
        head_dim=64,
        num_local_experts=32,
        num_experts_per_tok=4,
        sliding_window=128,
    ),
    "google/gemma-3-12b-it": {
        "model_type": "gemma3",
        "tie_word_embeddings": True,
        "text_config": _llama(
            "gemma3_text",
            *(3840, 15360, 48, 16, 8, 262208),
            head_dim=256,
            sliding_window=1024,
            tie_word_embeddings=True,
        ),
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "image_size": 896,
            "patch_size": 14,
        },
    },
}
