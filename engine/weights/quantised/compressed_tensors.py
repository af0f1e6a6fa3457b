"""compressed-tensors: groups of modules, each with a scheme; a checkpoint may mix several layouts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.weights.quantised.form import SIXTEEN, Form, Matrix, Quantisation, SchemeKeys, StoredCodes, Tensors
from engine.weights.quantised.fp8 import Float8, input_tensors
from engine.weights.quantised.grid import Grid, read_grid
from engine.weights.quantised.mxfp4 import MX_GROUP, NV_GROUP, Float4
from shared.errors import ModelError

if TYPE_CHECKING:
    from engine.weights.quantised.module_tensors import ModuleTensors
    from kernels.ops.linears.codes import Codes

PACKED, INT, FLOAT, NAIVE = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"
NVFP4, MXFP4, MXFP8 = "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"
MIXED = "mixed-precision"
SERVED = (PACKED, INT, FLOAT, NAIVE, NVFP4, MXFP4, MXFP8, MIXED, "dense")
LINEAR, EMBEDDING = ("Linear", "LinearBase"), "Embedding"
EMBEDDINGS = ("embed_tokens", "wte", "wpe")


@dataclass(frozen=True, slots=True)
class Integers:
    """Symmetric or not, in octets or packed into words; what is stored is signed, and becomes unsigned here."""

    bits: int
    grid: Grid
    symmetric: bool
    packed: bool

    @property
    def label(self) -> str:
        kind = "symmetric" if self.symmetric else "asymmetric"
        return f"{self.bits} bits, {self.grid.label}, {kind}"

    def stored(self, matrix: Matrix) -> Mapping[str, Tensors]:
        shapes = self.grid.shapes(matrix)
        found = {".weight_scale": Tensors(SIXTEEN, shapes), **input_tensors(matrix)}
        if self.packed:
            found[".weight_packed"] = Tensors(("I32",), ((matrix.rows, _words(matrix.columns, self.bits)),))
            found[".weight_shape"] = Tensors(("I64", "I32"), ((2,),))
            found[".weight_g_idx"] = Tensors(("I32", "I64"), ((matrix.columns,),), optional=True)
            if not self.symmetric:
                groups = shapes[0][-1] if shapes[0] else 1
                found[".weight_zero_point"] = Tensors(("I32",), ((_words(matrix.rows, self.bits), groups),))
        else:
            found[".weight"] = Tensors(("I8",), ((matrix.rows, matrix.columns),))
            found[".weight_zero_point"] = Tensors(("I8",), shapes, optional=self.symmetric)
        return found

    def codes(self, matrix: Matrix, suffixes: Sequence[str]) -> StoredCodes:
        is_symmetric = self.symmetric and ".weight_zero_point" not in suffixes
        return StoredCodes(self.bits, self.grid.group(matrix), is_symmetric, ".weight_g_idx" in suffixes)

    def read(self, tensors: ModuleTensors, matrix: Matrix) -> Codes:
        import torch

        from engine.weights.quantised.module_tensors import unpacked
        from kernels.ops.linears.codes import Codes

        group, middle = self.grid.group(matrix), 1 << (self.bits - 1)
        scales = self.grid.spread(tensors.scales(".weight_scale"), matrix)
        zeros = torch.full(scales.shape, middle, dtype=torch.uint8)
        if not self.packed:
            codes = tensors[".weight"].view(torch.uint8) + middle  # signed octets: their sum wraps as it should
            if (stored := tensors.get(".weight_zero_point")) is not None:
                zeros = self.grid.spread(stored.view(torch.uint8) + middle, matrix)
            return Codes(codes, scales, group, self.bits, zeros)
        if tensors[".weight_shape"].tolist() != [matrix.rows, matrix.columns]:
            shape = tensors[".weight_shape"].tolist()
            raise tensors.fault(".weight_shape", f"says {shape}, expected {[matrix.rows, matrix.columns]}")
        codes = unpacked(tensors[".weight_packed"], self.bits)[:, : matrix.columns]
        if not self.symmetric:
            zeros = unpacked(tensors[".weight_zero_point"].t(), self.bits)[:, : matrix.rows].t().contiguous()
        order = tensors.order(".weight_g_idx", matrix.columns, group)
        if order is not None:
            codes = codes[:, order]
        return Codes(codes.contiguous(), scales, group, self.bits, zeros, gather=order)


def _words(count: int, bits: int) -> int:
    return -(-count * bits // 32)


@dataclass(frozen=True, slots=True)
class Targets:
    """What is ignored stays; else names and expressions decide before classes do."""

    ignored: tuple[str, ...]
    groups: tuple[tuple[tuple[str, ...], Form | None], ...]  # targets, and how they are stored

    def form_of(self, module: str) -> Form | None:
        if any(_names(target, module) for target in self.ignored):
            return None
        for matches in (_names, _is_class):
            for targets, form in self.groups:
                if any(matches(target, module) for target in targets):
                    return form
        return None


def _names(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return target == module


def _is_class(target: str, module: str) -> bool:
    is_embedding = module.rpartition(".")[2] in EMBEDDINGS
    return target == EMBEDDING if is_embedding else target in LINEAR


def read_compressed_tensors(keys: SchemeKeys) -> Quantisation:
    sparsity = keys.object("sparsity_config").get("format")
    layout = keys.get("format") or MIXED
    for key, value in (("sparsity_config.format", sparsity), ("format", layout)):
        if value is not None and ("24" in str(value) or "sparse" in str(value)):
            raise keys.fault(key, f"is {value!r}: 2:4 sparse weights are not served")
    if keys.object("transform_config").raw.get("config_groups"):
        raise keys.fault("transform_config", "is not served: weights that were rotated need rotated activations")
    groups, rounds = [], False
    for _, group in keys.objects("config_groups"):
        weights = group.object("weights")
        rounds |= group.get("input_activations") is not None
        form = _form(weights, group.one_of("format", SERVED, keys.one_of("format", SERVED, MIXED)))
        groups.append((group.names("targets"), form if weights.raw else None))
    ignored = keys.names("ignore")
    for target in (*ignored, *(target for targets, _ in groups for target in targets)):
        _check(keys, target)
    return Quantisation("compressed-tensors", Targets(ignored, tuple(groups)), rounds_activations=rounds)


def _check(keys: SchemeKeys, target: str) -> None:
    try:
        re.compile(target.removeprefix("re:") if target.startswith("re:") else "")
    except re.error as error:
        raise ModelError(f"{keys.path}: {target!r} is no regular expression: {error}") from error


def _form(weights: SchemeKeys, layout: str) -> Form | None:
    if not weights.raw or layout == "dense":
        return None
    kind = weights.one_of("type", ("int", "float"), "int")
    if layout in (MIXED, NAIVE):
        layout = INT if kind == "int" else FLOAT
        if weights.get("num_bits") == 4 and kind == "float":
            layout = NVFP4 if weights.get("group_size") == NV_GROUP else MXFP4
    bits = weights.bits("num_bits", served=_bits(layout))
    if layout in (NVFP4, MXFP4):
        group = NV_GROUP if layout == NVFP4 else MX_GROUP
        return Float4(group, whole=".weight_global_scale" if layout == NVFP4 else "")
    grid = read_grid(weights)
    if layout in (FLOAT, MXFP8):
        return Float8(grid, powers=layout == MXFP8)
    weights.one_of("type", ("int",), "int")
    return Integers(bits, grid, weights.flag("symmetric", True), packed=layout == PACKED)


def _bits(layout: str) -> tuple[int, ...]:
    if layout in (NVFP4, MXFP4):
        return (4,)
    return (8,) if layout in (FLOAT, MXFP8) else (4, 8)
