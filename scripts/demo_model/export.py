"""Writes a trained model as a Hugging Face directory."""

from __future__ import annotations

import argparse
import json

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from scripts.demo_model.corpus import END, EOS
from scripts.demo_model.model import SHAPES, DemoShape

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
    stored = {f"model.{name}": tensor.to(torch.bfloat16).contiguous() for name, tensor in weights.items()}
    save_file(stored, args.out / "model.safetensors", {"format": "pt"})
    (args.out / "model.safetensors").chmod(0o644)
    tokenizer = Tokenizer.from_file(str(args.work / "tokenizer.json"))
    for name, content in configs(SHAPES[args.size], tokenizer).items():
        (args.out / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    tokenizer.save(str(args.out / "tokenizer.json"))
    size = sum(tensor.numel() for tensor in load_file(args.out / "model.safetensors").values())
    figures = json.loads((args.work / f"{args.size}.json").read_text(encoding="utf-8"))
    print(json.dumps({"parameters": size, **figures}))


def configs(shape: DemoShape, tokenizer: Tokenizer) -> dict[str, dict[str, object]]:
    """The JSON files beside the weights, by name."""
    eos, end = tokenizer.token_to_id(EOS), tokenizer.token_to_id(END)
    return {
        "config": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": shape.vocab,
            "hidden_size": shape.hidden,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "intermediate_size": shape.intermediate,
            "max_position_embeddings": shape.context,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "rope_scaling": None,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "bos_token_id": eos,
            "eos_token_id": eos,
        },
        "tokenizer_config": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": EOS,
            "eos_token": EOS,
            "add_bos_token": True,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": shape.context,
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
