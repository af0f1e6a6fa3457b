"""Writes a trained model as a Hugging Face directory."""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from scripts.bench.common.models import HEAD
from scripts.demo_model.corpus import END, EOS
from scripts.demo_model.model import SHAPES

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{% else %}<|user|>{% endif %}"
    "{{ message['content'] | trim }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def export(args: argparse.Namespace) -> None:
    """Write config, weights in bfloat16, tokenizer and generation defaults; print the figures reached."""
    args.out.mkdir(parents=True, exist_ok=True)
    weights = torch.load(args.work / f"{args.size}.pt", weights_only=True)["model"]
    stored = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in weights.items() if name != HEAD}
    save_file(stored, args.out / "model.safetensors", {"format": "pt"})
    (args.out / "model.safetensors").chmod(0o644)
    tokenizer = Tokenizer.from_file(str(args.work / "tokenizer.json"))
    for name, content in configs(SHAPES[args.size], tokenizer).items():
        (args.out / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    start = [(EOS, tokenizer.token_to_id(EOS))]  # a story's first token, as it was trained
    tokenizer.post_processor = TemplateProcessing(single=f"{EOS} $A", pair=f"{EOS} $A $B", special_tokens=start)
    tokenizer.save(str(args.out / "tokenizer.json"))
    size = sum(tensor.numel() for tensor in stored.values())
    figures = json.loads((args.work / f"{args.size}.json").read_text(encoding="utf-8"))
    print(json.dumps({"parameters": size, **figures}))


def configs(shape: dict[str, Any], tokenizer: Tokenizer) -> dict[str, dict[str, object]]:
    """The JSON files beside the weights, by name."""
    eos, end = tokenizer.token_to_id(EOS), tokenizer.token_to_id(END)
    return {
        "config": {**shape, "bos_token_id": eos, "eos_token_id": eos},
        "tokenizer_config": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": EOS,
            "eos_token": EOS,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": shape["max_position_embeddings"],
            "chat_template": CHAT_TEMPLATE,
        },
        "generation_config": {
            "bos_token_id": eos,
            "eos_token_id": [eos, end],
            "do_sample": True,
            "temperature": 0.7,
            "top_p": 0.9,
        },
    }
