"""Which of vLLM's files are run, and why a test of them cannot pass here: named, or it counts as failed."""

from __future__ import annotations

import fnmatch

FILES = (
    "anthropic/test_messages.py",
    "openai/chat_completion/test_chat.py",
    "openai/chat_completion/test_chat_completion.py",
    "openai/chat_completion/test_chat_echo.py",
    "openai/chat_completion/test_chat_logit_bias_validation.py",
    "openai/chat_completion/test_completion_with_function_calling.py",
    "openai/chat_completion/test_enable_force_include_usage.py",
    "openai/chat_completion/test_extra_content_fields.py",
    "openai/chat_completion/test_include_reasoning.py",
    "openai/chat_completion/test_logprob_token_ids.py",
    "openai/chat_completion/test_root_path.py",
    "openai/chat_completion/test_thinking_token_budget.py",
    "openai/chat_completion/test_batched_chat_completions.py",
    "openai/completion/test_completion.py",
    "openai/completion/test_prompt_validation.py",
    "openai/completion/test_token_in_token_out.py",
    "openai/models/test_models.py",
    "openai/responses/test_simple.py",
    "openai/test_chunked_prompt.py",
    "openai/test_openai_schema.py",
    "openai/test_return_token_ids.py",
    "openai/test_return_tokens_as_ids.py",
    "pooling/basic/test_truncation.py",
    "pooling/classify/test_online.py",
    "pooling/embed/test_online.py",
    "pooling/embed/test_online_dimensions.py",
    "pooling/embed/test_online_long_text.py",
    "serve/instrumentator/test_basic.py",
    "serve/instrumentator/test_metrics.py",
    "serve/instrumentator/test_orca_metrics.py",
    "serve/lora/test_lora_adapters.py",
    "serve/tokenize/test_tokenization.py",
    "tool_parsers/test_hermes_tool_parser.py",
)

NOT_HTTP = (  # tests of vLLM's own classes, without a server
    "*::test_chat_completion_request_*",
    "*::test_null_top_logprobs_is_same_as_omitted*",
    "*::test_completion_request_bad_words_*",
    "*::test_completion_request_forwards_*",
    "*::test_load_prompt_embeds*",
    "*::test_disable_prompt_embeds*",
    "*_decouples_top_k_from_explicit_token_ids",
    "*::test_completion_rejects_explicit_token_ids_*",
    "*::test_requests_reject_explicit_token_ids_*",
    "*::test_responses_api_logprobs_with_return_tokens_as_token_ids",
    "*::test_health_check_engine_dead_error",
    "*::test_metrics_exist_run_batch",
    "*::test_openapi_exposes_completion_response_schemas",
    "tool_parsers/*::test_hermes_parser_*",
    "tool_parsers/*::test_hermes_streaming_*",
    "*test_batched_chat_completions.py::test_*serving*",
)

# Not run, and counted as failed: it expects status 500 for files that are no adapter, and without that asks for ever.
NEVER_ENDS = "*::test_loading_invalid_adapters_does_not_break_others*"

SENSE = "the model: what it says means nothing, and it calls one function, whatever is asked"
LORA = "vLLM's words for an adapter that cannot be loaded, and adapters that were trained to say something"
WORDS = "wording: Pageant's errors say the same in OpenAI's shape and types, not in vLLM's words or pydantic's"
EXTENSION = "an extension of vLLM's that Pageant refuses by name"
KEYS = "a key of 7 characters, which Pageant refuses at its start, so that the test's server has none"
EMBEDDER = "an embedding model (BERT) with its reference, template or tokenizer"
CACHE = "Anthropic's own meaning: the first event says input apart from what is cached, and every prefix is cached"
POOLING = "a model of two labels scores pairs here, which vLLM refuses"
MORE = "Pageant tells more: usage has details"
LIMITS = "a limit: all 151,936 log-probabilities of each token of a prompt are more than one answer may hold"
IMAGES = "a model that sees"
PADDING = "padding: no model that is served needs it"
ROOM = "a limit: a prompt of all max_model_len tokens leaves no room for the token that comes with every embedding"
VERSION = "vLLM's own version"
GRANITE = "Granite's format of calls"

REASONS = {  # by pattern, why a test cannot pass; the first that fits
    "serve/lora/*": LORA,
    "tool_parsers/*granite4*": GRANITE,
    "tool_parsers/*": SENSE,
    "*::test_token_in_token_out*": EXTENSION,
    "*translategemma*": EXTENSION,
    "*::test_chat_session_root_path_with_api_key*[01]]": KEYS,
    "*::test_prompt_logprobs": LIMITS,
    "*::test_single_chat_session*": MORE,
    "*orca*::test_single_completion*": MORE,
    "*::test_more_than_one_prompt_logprobs_chat*": SENSE,
    "*::test_complex_message_content": SENSE,
    "*::test_named_tool_use": SENSE,
    "*::test_response_format_json_*": SENSE,
    "*::test_structured_outputs_*_chat": SENSE,
    "anthropic/*_cache_usage": CACHE,
    "*::test_chat_completion_with_tool_use": SENSE,
    "*::test_long_seed": WORDS,
    "*::test_empty_prompt": WORDS,
    "*::test_params_not_supported*": WORDS,
    "*::test_bigger_truncation_size": WORDS,
    "*::test_pooling_not_supported*": WORDS,
    "pooling/classify/*::test_chat_request*": EMBEDDER,
    "pooling/classify/*::test_score*": POOLING,
    "pooling/classify/*::test_rerank*": POOLING,
    "pooling/embed/*::test_basic*": EMBEDDER,
    "pooling/embed/*::test_completion_request*": EMBEDDER,
    "pooling/embed/*::test_chat_request*": EMBEDDER,
    "pooling/embed/*::test_base64_embedding*": EMBEDDER,
    "pooling/embed/*::test_matryoshka*": EMBEDDER,
    "pooling/embed/test_online_long_text*": EMBEDDER,
    "pooling/embed/*::test_padding*": PADDING,
    "pooling/basic/*::test_max_truncation_size": ROOM,
    "serve/*::test_metrics_exist*multimodal*": IMAGES,
    "serve/*::test_show_version": VERSION,
}


def never_ends(name: str) -> bool:
    return fnmatch.fnmatchcase(name, NEVER_ENDS)


def is_http(name: str) -> bool:
    return not any(fnmatch.fnmatchcase(name, pattern) for pattern in NOT_HTTP)


def reason_of(name: str) -> str | None:
    """Of a test, by its path and name; None where it should pass."""
    return next((reason for pattern, reason in REASONS.items() if fnmatch.fnmatchcase(name, pattern)), None)
