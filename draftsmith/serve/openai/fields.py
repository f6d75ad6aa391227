"""The tables of fields that are ignored or refused, with the reasons.

The names are those of OpenAI's API, and those that vLLM, SGLang and llama.cpp add and clients send.
`docs/reference/requests.md` is made from these tables and from the models of
`draftsmith.serve.openai.text_request` and `openai_requests`.
"""

from typing import Any

from pydantic import BaseModel

from draftsmith.net.api_error import ApiError
from draftsmith.serve.openai.known_fields import Refused, shown

_LABEL = "labels the request for its sender"
_CACHE = "the prefix cache needs no advice"
_SPEED = "has no effect on the text"
_NO_REASONING = "reasoning is a part of the text and is not taken out of it"

IGNORED = {
    "metadata": _LABEL,
    "user": _LABEL,
    "safety_identifier": _LABEL,
    "request_id": _LABEL,
    "rid": _LABEL,
    "prompt_cache_key": _CACHE,
    "prompt_cache_options": _CACHE,
    "prompt_cache_retention": _CACHE,
    "cache_prompt": _CACHE,
    "id_slot": _CACHE,
    "parallel_tool_calls": "asks for nothing without tools",
    "spaces_between_special_tokens": "special tokens are not in the text",
    "include_reasoning": _NO_REASONING,
    "separate_reasoning": _NO_REASONING,
    "stream_reasoning": _NO_REASONING,
    "reasoning_format": _NO_REASONING,
    "guided_decoding_backend": "asks for nothing without a forced format",
    "guided_whitespace_pattern": "asks for nothing without a forced format",
    "mirostat_tau": "asks for nothing without mirostat",
    "mirostat_eta": "asks for nothing without mirostat",
    "dynatemp_exponent": "asks for nothing without dynatemp_range",
    "xtc_threshold": "asks for nothing without xtc_probability",
    "dry_base": "asks for nothing without dry_multiplier",
    "dry_allowed_length": "asks for nothing without dry_multiplier",
    "dry_penalty_last_n": "asks for nothing without dry_multiplier",
    "dry_sequence_breakers": "asks for nothing without dry_multiplier",
    "repeat_last_n": "asks for nothing without repeat_penalty",
    "penalize_nl": "asks for nothing without repeat_penalty",
    "keep_alive": _SPEED,
}

_TOOLS = "of tools, only functions are supported, in chats and responses"
_MEDIA = "images, audio and files are not supported"
_KEPT = "answers and conversations are not kept, so send the whole conversation with each request"

REFUSED: dict[str, dict[str, tuple[Any, ...]]] = {
    _TOOLS: {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "max_tool_calls": (),
        "web_search_options": (),
        "parse_tool_calls": (False,),
    },
    "forced formats have other names here: response_format, guided_* and structured_outputs": {
        "text": (
            {},
            {"format": {"type": "text"}},
            {"verbosity": "medium"},
            {"format": {"type": "text"}, "verbosity": "medium"},
        ),
        "structural_tag": (),
        "json_schema": (),
        "regex": (),
        "ebnf": (),
        "grammar": ("",),
        "grammar_lazy": (False,),
        "grammar_triggers": ([],),
    },
    _MEDIA: {
        "modalities": (["text"],),
        "audio": (),
        "image": (),
        "image_data": ([],),
        "mm_processor_kwargs": ({},),
    },
    _KEPT: {
        "previous_response_id": (),
        "conversation": (),
        "background": (False,),
        "background_options": (),
        "context_management": ([],),
        "session_params": (),
    },
    "single tokens are made likelier or less likely by logit_bias only": {
        "bad_words": ([],),
        "allowed_token_ids": (),
        "logits_processors": ([],),
        "custom_logit_processor": (),
        "custom_params": ({},),
    },
    "the penalties are repetition_penalty, presence_penalty and frequency_penalty": {
        "repeat_penalty": (1,),
        "dry_multiplier": (0,),
        "length_penalty": (1,),
    },
    "texts are drawn by temperature, top_k, top_p and min_p only": {
        "best_of": (1,),
        "typical_p": (1,),
        "top_n_sigma": (-1,),
        "tfs_z": (1,),
        "mirostat": (0,),
        "xtc_probability": (0,),
        "dynatemp_range": (0,),
        "samplers": (),
        "min_keep": (0,),
        "use_beam_search": (False,),
        "early_stopping": (False,),
    },
    "a text ends at its end token, a stop token, a stop string or its limit": {
        "stop_regex": ([], ""),
        "include_stop_str_in_output": (False,),
        "no_stop_trim": (False,),
        "t_max_predict_ms": (0, -1),
        "n_indent": (0,),
        "thinking_token_budget": (),
        "verbosity": ("medium",),
    },
    "prompts are taken as they are": {
        "truncate_prompt_tokens": (),
        "truncation": ("disabled",),
        "n_keep": (0, -1),
        "n_discard": (0,),
        "suffix": ("",),
        "input_prefix": ("",),
        "input_suffix": ("",),
        "input_extra": ([],),
        "prompt_embeds": (),
        "documents": ([],),
        "chat_template": (),
    },
    "the answer has the text alone, and its log-probabilities if they are asked for": {
        "echo": (False,),
        "prompt_logprobs": (),
        "n_probs": (0,),
        "post_sampling_probs": (False,),
        "skip_special_tokens": (True,),
        "detokenize": (True,),
        "return_tokens": (False,),
        "return_tokens_as_token_ids": (False,),
        "return_hidden_states": (False,),
        "return_routed_experts": (False,),
        "return_progress": (False,),
        "timings_per_token": (False,),
        "moderation": (),
    },
    "drafts are set for the whole service, at /admin/settings": {
        "prediction": (),
        "speculative.n_max": (),
        "speculative.n_min": (),
        "speculative.p_min": (),
    },
    "adapters are on the drafter, and draftsmith.label chooses one": {
        "lora": ([],),
        "lora_path": (),
    },
    "this service has one model and one class of requests": {
        "service_tier": ("auto", "default"),
        "priority": (0,),
        "access_programs": (),
        "cache_salt": (),
        "kv_transfer_params": (),
        "vllm_xargs": ({},),
        "data_parallel_rank": (),
        "bootstrap_host": (),
        "bootstrap_port": (),
        "bootstrap_room": (),
    },
}

_SENT_BACK = "comes back from earlier answers"
MESSAGE_IGNORED = {
    "name": "chat templates have no names",
    "id": _SENT_BACK,
    "type": _SENT_BACK,
    "status": _SENT_BACK,
    "phase": _SENT_BACK,
    "annotations": _SENT_BACK,
    "provider_specific_fields": _SENT_BACK,
    "cache_control": _CACHE,
}
MESSAGE_REFUSED: Refused = {
    _TOOLS: {"tool_calls": ([],), "function_call": (), "tool_call_id": ()},
    _MEDIA: {"audio": (), "images": ([],)},
    "only text can be in a message": {"refusal": ("",), "thinking_blocks": ([],)},
    "the end of a message is continued by continue_final_message": {"prefix": (False,)},
}
PART_IGNORED = {
    "cache_control": _CACHE,
    "prompt_cache_breakpoint": _CACHE,
    "annotations": _SENT_BACK,
    "logprobs": _SENT_BACK,
}
# Kinds of parts and items, by the first letters of their type.
KINDS = {
    "image": _MEDIA,
    "input_image": _MEDIA,
    "input_audio": _MEDIA,
    "audio": _MEDIA,
    "video": _MEDIA,
    "file": _MEDIA,
    "input_file": _MEDIA,
    "document": _MEDIA,
    "container_upload": _MEDIA,
    "search_result": "only text can be in a message",
    "item_reference": _KEPT,
    "compaction": _KEPT,
    "refusal": "only text can be in a message",
}


def ignored_by(request: type[BaseModel]) -> dict[str, str]:
    """The ignored fields that this kind of request does not serve."""
    return {name: why for name, why in IGNORED.items() if name not in request.model_fields}


def unsupported(kind: Any, path: str) -> ApiError:
    """A part or an item of another type than text."""
    causes = (cause for begin, cause in KINDS.items() if str(kind).startswith(begin))
    cause = next(causes, _TOOLS)
    message = f"{cause}: {path} is {shown(kind)}. Leave it out."
    return ApiError(400, message, param=path, code="unsupported_value")
