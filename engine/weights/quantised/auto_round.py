"""AutoRound: others' layouts under its own name, with changes for single modules."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from engine.weights.quantised.awq import BITS as AWQ_BITS
from engine.weights.quantised.awq import Awq
from engine.weights.quantised.form import Form, Quantisation, SchemeKeys
from engine.weights.quantised.fp8 import INVERSE, SCALE, Float8
from engine.weights.quantised.gptq import Gptq
from engine.weights.quantised.grid import ANY, Grid

GPTQ, AWQ, PLAIN, FP8 = "auto_round:auto_gptq", "auto_round:auto_awq", "auto_round", "auto_round:fp8"
LESS = {GPTQ: 1, PLAIN: 0}  # that zeros are stored less by
SIXTEEN_BITS = 16
EXPRESSION = set("*+?^$()[]{}|\\")


@dataclass(frozen=True, slots=True)
class Overrides:
    """Exact names first, then expressions found anywhere in a name; modules outside of the blocks stay as they are."""

    form: Form
    named: Mapping[str, Form | None]
    blocks: tuple[str, ...]  # empty: all

    def form_of(self, module: str) -> Form | None:
        if module in self.named:
            return self.named[module]
        for pattern, form in self.named.items():
            if _found(pattern, module):
                return form
        inside = not self.blocks or any(module.startswith(block + ".") for block in self.blocks)
        return self.form if inside else None


def _found(pattern: str, module: str) -> bool:
    """A key without any of an expression's signs is a name: that of a router is no part of a projection's."""
    if not EXPRESSION & set(pattern):
        return False
    try:
        return re.search(pattern, module) is not None
    except re.error:
        return False


def read_auto_round(keys: SchemeKeys) -> Quantisation:
    packing = keys.one_of("packing_format", (GPTQ, AWQ, PLAIN, FP8, "auto_round:gptq", "auto_round:awq"), GPTQ)
    packing = packing.replace(":gptq", ":auto_gptq").replace(":awq", ":auto_awq")
    extra = keys.object("extra_config")
    named = {name: _form(packing, keys, extra.object(name)) for name in extra.raw}
    blocks = keys.get("block_name_to_quantize", "to_quant_block_names")
    if isinstance(blocks, str):
        blocks = [block.strip() for block in blocks.split(",")]
    form = _form(packing, keys, SchemeKeys({}))
    if form is None:
        raise keys.fault("bits", "leaves all weights in 16 bits")
    is_float = packing == FP8
    return Quantisation("AutoRound", Overrides(form, named, tuple(map(str, blocks or ()))), rounds_activations=is_float)


def _form(packing: str, keys: SchemeKeys, changes: SchemeKeys) -> Form | None:
    """Of the scheme's keys with one module's changes."""
    both = SchemeKeys({**keys.raw, **changes.raw}, changes.path if changes.raw else keys.path)
    bits = both.get("bits")
    if isinstance(bits, int) and bits >= SIXTEEN_BITS:
        return None
    if packing == FP8:
        both.bits("bits", served=(8,))
        return _fp8(both)
    kind = both.get("data_type") or "int"
    if kind not in ("int", "int_sym", "int_asym"):
        raise both.fault("data_type", f"is {kind!r}, which is not served in packing_format {packing}; served: int")
    group = both.group("group_size")
    if packing == AWQ:
        both.bits("bits", served=(AWQ_BITS,))
        return Awq(group)
    return Gptq(both.bits("bits"), group, both.flag("sym", True), LESS[packing])


def _fp8(keys: SchemeKeys) -> Float8:
    size = keys.get("group_size")
    if isinstance(size, list | tuple) and len(size) == 2:
        return Float8(Grid(int(size[0]), int(size[1])), f"{INVERSE}|{SCALE}")
    return Float8(Grid(ANY), f"{SCALE}|{INVERSE}")
