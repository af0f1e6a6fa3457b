"""One model under every spelling that its family's checkpoints have: the same log-probabilities bit for bit."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared.errors import ModelError
from tests.engine.checkpoints import COMMON, GEMMA, GEMMA4, make_runner, random_prompt, save_checkpoint
from tests.engine.driver import Driver
from tests.engine.modeling.test_logits import ALL_LOGPROBS

Tensors = dict[str, Tensor]


def found(directory: Path, kernels: str) -> object:
    driver = Driver(make_runner(directory, kernels))
    sequence = driver.add(0, random_prompt(30, seed=4), ALL_LOGPROBS)
    driver.generate(3, chunk=16)
    return sequence.prompt_logprobs, sequence.logprobs


def stack(names: dict[str, tuple[str, ...]], prefix: str) -> Callable[[Tensors], Tensors]:
    """Experts that stand one by one into stacks, as transformers holds them since version 5."""

    def change(tensors: Tensors) -> Tensors:
        changed = dict(tensors)
        for layer in range(COMMON["num_hidden_layers"]):
            for stacked, modules in names.items():
                parts = []
                for expert in range(6):
                    keys = [f"model.layers.{layer}.{prefix}.experts.{expert}.{module}.weight" for module in modules]
                    parts.append(torch.cat([changed.pop(key) for key in keys]))
                changed[f"model.layers.{layer}.mlp.experts.{stacked}"] = torch.stack(parts)
        return {re.sub(rf"\.{prefix}\.gate\.weight", ".mlp.gate.weight", name): one for name, one in changed.items()}

    return change


MIXTRAL = stack({"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}, "block_sparse_moe")


def without_prefix(tensors: Tensors) -> Tensors:
    return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize(
    ("variant", "change"), [("mixtral", MIXTRAL), ("gpt2", without_prefix)], ids=["stacked", "bare"]
)
def test_spellings(variant: str, change: Callable[[Tensors], Tensors], kernels: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "one", variant, kernels)
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    path = tmp_path / "other" / "model.safetensors"
    before = load_file(path)
    after = change(before)
    assert after.keys() != before.keys()
    save_file({name: tensor.contiguous() for name, tensor in after.items()}, path)
    assert found(tmp_path / "other", kernels) == found(tmp_path / "one", kernels)


def save_with_vision(directory: Path) -> None:
    text = COMMON | GEMMA | {"hidden_size": 64, "intermediate_size": 80}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    torch.manual_seed(7)
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(directory)


def save_gemma4_with_vision(directory: Path) -> None:
    text = COMMON | GEMMA4 | {"hidden_size": 64, "intermediate_size": 80, "head_dim": 32}
    vision = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 16,
    }  # fmt: skip
    config = transformers.Gemma4Config(text_config=text, vision_config=vision, audio_config=None)
    torch.manual_seed(7)
    transformers.Gemma4ForConditionalGeneration(config).save_pretrained(directory)


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize(
    ("save", "family"), [(save_with_vision, "Gemma3ForCausalLM"), (save_gemma4_with_vision, "Gemma4ForCausalLM")]
)
def test_the_text_part_of_a_model_that_sees(
    save: Callable[[Path], None], family: str, kernels: str, tmp_path: Path
) -> None:
    save(tmp_path / "both")
    tensors = load_file(tmp_path / "both" / "model.safetensors")
    assert any("vision_tower" in name for name in tensors)
    config = json.loads((tmp_path / "both" / "config.json").read_text(encoding="utf-8"))
    text = {
        re.sub(r"^(language_model\.model|model\.language_model)\.", "model.", name): t for name, t in tensors.items()
    }
    text = {name: tensor for name, tensor in text.items() if name.startswith("model.") and "vision" not in name}
    (tmp_path / "text").mkdir()
    save_file({name: t for name, t in text.items() if "projector" not in name}, tmp_path / "text" / "model.safetensors")
    written = {**config["text_config"], "architectures": [family]}
    (tmp_path / "text" / "config.json").write_text(json.dumps(written), encoding="utf-8")
    assert found(tmp_path / "both", kernels) == found(tmp_path / "text", kernels)


def test_tensors_that_no_part_has_are_refused(tmp_path: Path) -> None:
    save_with_vision(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"model.audio_tower.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"has model\.audio_tower\.weight, which Gemma3ForConditionalGeneration"):
        make_runner(tmp_path)
