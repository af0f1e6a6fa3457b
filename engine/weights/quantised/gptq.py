"""GPTQ: codes lie along the input features of [in_features, out_features], zeros along the output features.

The first version of the format stores zeros less one, the second as they are.  Symmetric zeros are not read at all:
writers of both versions have used both labels for them, and their value is known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.weights.quantised.form import (
    SIXTEEN,
    Form,
    Matrix,
    Quantisation,
    SchemeKeys,
    StoredCodes,
    Tensors,
    describe_group,
    groups_of,
    words,
)

if TYPE_CHECKING:
    from engine.weights.quantised.module_tensors import ModuleTensors
    from kernels.ops.linears.codes import Codes

FORMATS = {"gptq": 1, "gptq_v2": 0}  # `checkpoint_format` -> what zeros are stored less by


@dataclass(frozen=True, slots=True)
class Gptq:
    bits: int
    group: int  # -1: all input features
    symmetric: bool
    less: int = 1  # that zeros are stored less by

    @property
    def label(self) -> str:
        kind = "symmetric" if self.symmetric else "asymmetric"
        return f"{self.bits} bits, {describe_group(self.group)}, {kind}"

    def stored(self, matrix: Matrix) -> Mapping[str, Tensors]:
        groups = groups_of(matrix, self.group)
        packed = words(matrix.columns, self.bits, "input features")
        zeros = words(matrix.rows, self.bits, "output features")
        return {
            ".qweight": Tensors(("I32",), ((packed, matrix.rows),)),
            ".qzeros": Tensors(("I32",), ((groups, zeros),), optional=self.symmetric),
            ".scales": Tensors(SIXTEEN, ((groups, matrix.rows),)),
            ".g_idx": Tensors(("I32", "I64"), ((matrix.columns,),), optional=True),
        }

    def codes(self, matrix: Matrix, suffixes: Sequence[str]) -> StoredCodes:
        group = matrix.columns if self.group == -1 else self.group
        return StoredCodes(self.bits, group, self.symmetric, ".g_idx" in suffixes)

    def read(self, tensors: ModuleTensors, matrix: Matrix) -> Codes:
        import torch

        from engine.weights.quantised.module_tensors import unpacked
        from kernels.ops.linears.codes import Codes

        group = matrix.columns if self.group == -1 else self.group
        words = tensors[".qweight"]
        codes = unpacked(words[:, :, None], self.bits).permute(1, 0, 2).reshape(matrix.rows, matrix.columns)
        scales = tensors.scales(".scales").t().contiguous()
        if self.symmetric:
            zeros = torch.full(scales.shape, 1 << (self.bits - 1), dtype=torch.uint8)
        else:
            stored = unpacked(tensors[".qzeros"], self.bits).t().contiguous()
            zeros = (stored + self.less) & ((1 << self.bits) - 1)  # a zero of 0 was stored as all ones
        order = tensors.order(".g_idx", matrix.columns, group)
        if order is not None:
            codes = codes[:, order]
        return Codes(codes, scales, group, self.bits, zeros, gather=order)


@dataclass(frozen=True, slots=True)
class Dynamic:
    """GPTQModel's overrides: the first expression that a module's name begins with decides."""

    form: Form
    rules: tuple[tuple[str, Form | None], ...]

    def form_of(self, module: str) -> Form | None:
        return next((form for pattern, form in self.rules if re.match(pattern, module)), self.form)


def read_gptq(keys: SchemeKeys) -> Quantisation:
    key = "checkpoint_format" if keys.get("checkpoint_format") is not None else "format"
    less = FORMATS[keys.one_of(key, list(FORMATS), "gptq")]
    form = Gptq(keys.bits("bits"), keys.group("group_size"), keys.flag("sym", True), less)
    rules: list[tuple[str, Form | None]] = []
    dynamic = keys.object("dynamic")
    for pattern in dynamic.raw:
        expression = pattern[2:] if pattern[:2] in ("+:", "-:") else pattern
        try:
            re.compile(expression)
        except re.error as error:
            raise dynamic.fault(pattern, f"is no regular expression: {error}") from error
        rules.append((expression, None if pattern[:2] == "-:" else _changed(form, dynamic.object(pattern))))
    return Quantisation("GPTQ", Dynamic(form, tuple(rules)))


def _changed(form: Gptq, keys: SchemeKeys) -> Gptq:
    return replace(
        form,
        bits=keys.bits("bits") if keys.get("bits") is not None else form.bits,
        group=keys.group("group_size", default=form.group),
        symmetric=keys.flag("sym", form.symmetric),
    )
