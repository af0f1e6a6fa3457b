"""Families of decoders that are served: a row for each architecture that a config.json may name."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from engine.description.families import (
    deepseek,
    gemma,
    gpt2,
    gpt_oss,
    granite,
    llama,
    moe,
    olmo2,
    phi3,
    qwen3_next,
    smollm3,
)
from engine.description.keys import ConfigKeys
from engine.description.names import MtpNames, NameTable
from engine.description.spec import ModelSpec


class Family(NamedTuple):
    title: str  # in documents
    describe: Callable[[ConfigKeys], ModelSpec]
    names: tuple[NameTable, ...]  # spellings of its checkpoints
    text_of: bool = False  # the text part of a model that sees as well, whose description is under text_config
    mtp: MtpNames | None = None  # a layer to draft with that some checkpoints have


FAMILIES = {
    "LlamaForCausalLM": Family("Llama", llama.llama, llama.NAMES),
    "MistralForCausalLM": Family("Mistral", llama.mistral, llama.NAMES),
    "Qwen2ForCausalLM": Family("Qwen2", llama.qwen2, llama.NAMES),
    "Qwen3ForCausalLM": Family("Qwen3", llama.qwen3, llama.NAMES),
    "GPT2LMHeadModel": Family("GPT-2", gpt2.gpt2, gpt2.NAMES),
    "Phi3ForCausalLM": Family("Phi-3 and Phi-4", phi3.phi3, phi3.NAMES),
    "Gemma2ForCausalLM": Family("Gemma 2", gemma.gemma2, gemma.NAMES),
    "Gemma3ForCausalLM": Family("Gemma 3", gemma.gemma3, gemma.NAMES),
    "Gemma3ForConditionalGeneration": Family("Gemma 3 (its text part)", gemma.gemma3, gemma.MULTIMODAL_NAMES, True),
    "Gemma4ForCausalLM": Family("Gemma 4", gemma.gemma4, gemma.GEMMA4_NAMES),
    "Gemma4ForConditionalGeneration": Family(
        "Gemma 4 (its text part)", gemma.gemma4, gemma.GEMMA4_MULTIMODAL_NAMES, True
    ),
    "Olmo2ForCausalLM": Family("OLMo 2", olmo2.olmo2, olmo2.NAMES),
    "GraniteForCausalLM": Family("Granite", granite.granite, granite.NAMES),
    "SmolLM3ForCausalLM": Family("SmolLM3", smollm3.smollm3, smollm3.NAMES),
    "MixtralForCausalLM": Family("Mixtral", moe.mixtral, moe.MIXTRAL_NAMES),
    "Qwen2MoeForCausalLM": Family("Qwen2-MoE", moe.qwen2_moe, moe.QWEN_NAMES),
    "Qwen3MoeForCausalLM": Family("Qwen3-MoE", moe.qwen3_moe, moe.QWEN_NAMES),
    "GptOssForCausalLM": Family("gpt-oss", gpt_oss.gpt_oss, gpt_oss.NAMES),
    "DeepseekV2ForCausalLM": Family("DeepSeek-V2", deepseek.deepseek_v2, deepseek.NAMES),
    "DeepseekV3ForCausalLM": Family("DeepSeek-V3", deepseek.deepseek_v3, deepseek.NAMES, mtp=deepseek.MTP),
    "Qwen3NextForCausalLM": Family("Qwen3-Next", qwen3_next.qwen3_next, qwen3_next.NEXT_NAMES, mtp=qwen3_next.MTP),
    "Qwen3_5ForCausalLM": Family("Qwen3.5", qwen3_next.qwen3_5, qwen3_next.NAMES, mtp=qwen3_next.MTP),
    "Qwen3_5MoeForCausalLM": Family("Qwen3.5-MoE", qwen3_next.qwen3_5_moe, qwen3_next.MOE_NAMES, mtp=qwen3_next.MTP),
    "Qwen3_5ForConditionalGeneration": Family(
        "Qwen3.5 (its text part)", qwen3_next.qwen3_5, qwen3_next.MULTIMODAL_NAMES, True, qwen3_next.MTP
    ),
    "Qwen3_5MoeForConditionalGeneration": Family(
        "Qwen3.5-MoE (its text part)", qwen3_next.qwen3_5_moe, qwen3_next.MULTIMODAL_MOE_NAMES, True, qwen3_next.MTP
    ),
}
