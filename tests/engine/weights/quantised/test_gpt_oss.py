"""gpt-oss's experts in MXFP4, against transformers' own way to unpack them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine.description.reading import read_config
from engine.weights.source import Checkpoint
from tests.engine.checkpoints import KERNELS, save_checkpoint
from tests.engine.weights.quantised.encoders import change_config
from tests.engine.weights.quantised.served import assert_served

SHAPE = {"hidden_size": 64, "intermediate_size": 96}


def save_stacks(directory: Path, kernels: str, further: dict[str, Any]) -> Any:
    """A checkpoint whose experts are MXFP4; returns transformers' model of what that stands for."""
    model = save_checkpoint(directory, "gpt-oss", kernels, SHAPE | {"head_dim": 32} | further)
    path = directory / "model.safetensors"
    tensors, generator = load_file(path), torch.Generator().manual_seed(3)
    parameters = dict(model.named_parameters())
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        shape = experts, rows, columns // 32
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(119, 126, shape, generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        parameters[name].data.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    save_file(tensors, path)
    change_config(directory, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return model


@pytest.mark.parametrize("kernels", KERNELS)
def test_stacks_of_experts(kernels: str, tmp_path: Path) -> None:
    model = save_stacks(tmp_path, kernels, {})
    parameters = dict(model.named_parameters())
    assert_served(tmp_path, kernels, model)
    source = Checkpoint(tmp_path, read_config(tmp_path))
    stacked = [part for part in source.tensors.parts() if part.expert == 2 and part.rows is not None and part.shape[1:]]
    for part in stacked:
        codes = source.take_codes(part)
        assert (codes is None) == (len(part.shape) == 2), "biases are no codes"
        if codes is not None:
            whole = parameters[part.name][2].T[part.rows]
            assert torch.equal(codes.dequantised(), whole) and codes.bits == 4
