"""Writers of quantised checkpoints after the published layouts, word by word; the readers share no code with them.

Each gives the tensors of a matrix by what stands behind the module's name, and the weight that they stand for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.checkpoints import save_checkpoint

Stored = dict[str, Tensor]
Encoded = tuple[Stored, Tensor]  # the tensors of a module, and the weight [out_features, in_features] float32
Encode = Callable[[str, Tensor], Encoded | None]  # of a module's name and weight; None: it stays
Ints = NDArray[np.int64]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # output features of a word's nibbles, the lowest first
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def codes_of(weight: Tensor, bits: int, group: int, zero: int | None = None) -> tuple[Ints, Ints, Tensor]:
    """Codes [n, k], zeros [n, groups] and scales [n, groups] in float16; `zero` of all groups, or each its own."""
    w = weight.float().numpy()
    rows, columns, most = *w.shape, (1 << bits) - 1
    groups = -(-columns // group)
    codes = np.zeros((rows, columns), np.int64)
    zeros, scales = np.zeros((rows, groups), np.int64), np.zeros((rows, groups), np.float16)
    for g in range(groups):
        piece = w[:, g * group : (g + 1) * group]
        if zero is None:
            low, high = np.minimum(piece.min(1), 0), np.maximum(piece.max(1), 0)
            scales[:, g] = np.maximum((high - low) / most, 1e-4)
            zeros[:, g] = np.clip(np.round(-low / scales[:, g].astype(np.float32)), 0, most)
        else:
            scales[:, g] = np.maximum(np.abs(piece).max(1) / (most // 2), 1e-4)
            zeros[:, g] = zero
        scaled = np.round(piece / scales[:, g, None].astype(np.float32)) + zeros[:, g, None]
        codes[:, g * group : (g + 1) * group] = np.clip(scaled, 0, most)
    return codes, zeros, torch.from_numpy(scales)


def weight_of(codes: Ints, zeros: Ints, scales: Tensor, groups: Ints) -> Tensor:
    """`groups`: that of each column."""
    values = torch.from_numpy((codes - zeros[:, groups]).astype(np.float32))
    return values * scales.float()[:, torch.from_numpy(groups)]


def packed(codes: Ints, bits: int) -> Tensor:  # [a, b] -> [a, ceil(b * bits / 32)] int32
    """Along the last dimension, the lowest bits first."""
    words = np.zeros((codes.shape[0], -(-codes.shape[1] * bits // 32)), np.uint32)
    for at in range(codes.shape[1]):
        words[:, at * bits // 32] |= (codes[:, at] << (at * bits % 32)).astype(np.uint32)
    return torch.from_numpy(words.view(np.int32).copy())


def gptq(
    weight: Tensor,
    bits: int = 4,
    group: int = 32,
    *,
    symmetric: bool = False,
    less: int = 1,  # what zeros are stored less by
    order: Ints | None = None,  # input features in the order in which they are grouped
    index: bool = False,  # with g_idx, also where it says nothing
) -> Encoded:
    columns = weight.shape[1]
    order = np.arange(columns) if order is None else order
    codes, zeros, scales = codes_of(weight[:, order], bits, group, 1 << (bits - 1) if symmetric else None)
    back = np.argsort(order)
    codes, groups = codes[:, back], (np.arange(columns) // group)[back]
    stored = {
        ".qweight": packed(codes, bits).t().contiguous(),
        ".qzeros": packed(((zeros - less) % (1 << bits)).T, bits),
        ".scales": scales.t().contiguous(),
    }
    if index or (order != np.arange(columns)).any():
        stored[".g_idx"] = torch.from_numpy(groups.astype(np.int32))
    return stored, weight_of(codes, zeros, scales, groups)


def awq(weight: Tensor, group: int = 32) -> Encoded:
    codes, zeros, scales = codes_of(weight, 4, group)
    places = np.concatenate([start + np.array(AWQ_ORDER) for start in range(0, len(codes), 8)])
    stored = {
        ".qweight": packed(codes.T[:, places], 4),
        ".qzeros": packed(zeros.T[:, places], 4),
        ".scales": scales.t().contiguous(),
    }
    return stored, weight_of(codes, zeros, scales, np.arange(weight.shape[1]) // group)


def packed_integers(weight: Tensor, group: int, order: Ints) -> Encoded:
    """compressed-tensors' pack-quantized with `actorder` group: codes where they were, groups by an index."""
    stored, dequantised = gptq(weight, 4, group, order=order)
    codes, zeros, scales = codes_of(weight[:, order], 4, group)
    found = {
        ".weight_packed": packed(codes[:, np.argsort(order)], 4),
        ".weight_scale": scales,
        ".weight_shape": torch.tensor(weight.shape),
        ".weight_zero_point": packed(zeros.T, 4).t().contiguous(),
        ".weight_g_idx": stored[".g_idx"],
    }
    return found, dequantised


def float8(weight: Tensor, rows: int, columns: int, name: str = ".weight_scale_inv") -> Encoded:
    """Blocks, of which the last may be cut off."""
    grid = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
    scales, codes = torch.zeros(grid), torch.zeros(weight.shape)
    dequantised = torch.zeros(weight.shape)
    for y in range(grid[0]):
        for x in range(grid[1]):
            block = slice(y * rows, (y + 1) * rows), slice(x * columns, (x + 1) * columns)
            scales[y, x] = weight[block].abs().max() / 448
            codes[block] = weight[block] / scales[y, x]
            dequantised[block] = codes[block].to(torch.float8_e4m3fn).float() * scales[y, x]
    return {".weight": codes.to(torch.float8_e4m3fn), name: scales}, dequantised


def float4(weight: Tensor, group: int = 16) -> Encoded:
    """ModelOpt's NVFP4: scales of groups in E4M3, and one that multiplies them."""
    rows, columns = weight.shape
    whole = weight.abs().max() / (6 * 448)
    pieces = weight.view(rows, columns // group, group)
    scales = (pieces.abs().amax(2) / 6 / whole).to(torch.float8_e4m3fn)
    step = scales.float() * whole
    table = torch.tensor([*E2M1, *(-value for value in E2M1)])
    codes = (pieces[..., None] / step[:, :, None, None] - table).abs().argmin(-1)
    dequantised = (table[codes] * step[:, :, None]).view(rows, columns)
    flat = codes.view(rows, columns).to(torch.uint8)
    octets = flat[:, 0::2] + 16 * flat[:, 1::2]
    return {".weight": octets, ".weight_scale": scales, ".weight_scale_2": whole}, dequantised


def quantise(
    directory: Path,
    scheme: Mapping[str, Any],
    encode: Encode,
    *,
    file: str = "config.json",  # where the scheme stands
    further: dict[str, Any] | None = None,  # changes of the model's configuration
) -> Any:
    """Write a checkpoint with `encode`'s tensors for the matrices of its layers; the model has what they stand for."""
    model = save_checkpoint(directory, "llama-mha", "native", further)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    parameters = dict(model.named_parameters())
    for name in [name for name, tensor in tensors.items() if "layers" in name and tensor.ndim == 2]:
        module = name.removesuffix(".weight")
        encoded = encode(module, tensors[name])
        if encoded is None:
            continue
        del tensors[name]
        stored, weight = encoded
        tensors |= {module + suffix: tensor.contiguous() for suffix, tensor in stored.items()}
        parameters[name].data.copy_(weight)
    save_file(tensors, path)
    if file == "config.json":
        change_config(directory, quantization_config=dict(scheme))
    else:
        (directory / file).write_text(json.dumps(scheme), encoding="utf-8")
    return model


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def change_tensors(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
