"""Which matrices of a checkpoint stay the codes that they are stored as: those that native kernels multiply so, and
those that they, or Triton's on a GPU, decode while they multiply.

Decided by what is stored where, before a tensor is read; needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from engine.description.names import Part, Parts, TensorMap
from engine.description.spec import ModelSpec
from engine.description.tensors import PER_HEAD_SLOTS
from engine.weights.inventory import QuantisedMatrix
from engine.weights.quantised.form import StoredCodes

TOGETHER = 16  # features of codes of 4 bits that lie together: groups hold a multiple of them
WORD = 4  # octets that lie together
WORD_BITS = 32  # of codes that are decoded
EXACT_SLOTS = ("router", "shared_gate", "delta.gates", *PER_HEAD_SLOTS)  # multiplied as numbers by all kernels
PANEL = 32  # columns that native kernels pack together
# Input features that Triton's kernels multiply together, and groups hold whole: as they pack words.  They have 64 too,
# where that pads nothing, which is as many bytes.
SLABS = (32, 16)

QuantisedAs = Callable[[Part], QuantisedMatrix | None]


def common_form(parts: Parts, quantised_as: QuantisedAs) -> StoredCodes | None:
    """Of matrices that are joined to one weight; None: they are dequantised, as not all are codes of one kind.

    Integers: 4 bits in groups, or 8 bits that are int8 with a scale for each output feature.
    """
    whole, columns = _joined(parts, quantised_as), parts[0].wanted[1]
    if whole is None or whole.is_float:
        return None
    if whole.bits == 4:
        return None if columns % TOGETHER or whole.group % TOGETHER else whole
    is_int8 = whole.bits == 8 and whole.symmetric and whole.group >= columns
    return whole if is_int8 and columns % WORD == 0 else None


def decoded_form(parts: Parts, quantised_as: QuantisedAs) -> StoredCodes | None:
    """Of matrices that are joined to one weight, and decoded while it is multiplied; None: they are dequantised.

    Whether their input features are in another order, which these kernels do not have, shows when they are read.
    """
    whole, columns = _joined(parts, quantised_as), parts[0].wanted[1]
    if whole is None:
        return None
    together = WORD_BITS // whole.bits
    fits = columns % together == 0 and (whole.group >= columns or whole.group % together == 0)
    return whole if fits else None


def gpu_form(weights: Sequence[Parts], quantised_as: QuantisedAs) -> StoredCodes | None:
    """Of what is one weight of Triton's kernels, and decoded while it is multiplied: joined matrices, or those of each
    expert; None: they are dequantised, as is what turns out to be in another order when it is read."""
    forms, columns = [decoded_form(parts, quantised_as) for parts in weights], weights[0][0].wanted[1]
    first = forms[0]
    if first is None or (first.bits == 8 and not first.is_float) or not _slab(first, columns):
        return None
    kind = first.bits, first.group, first.is_float
    return first if all(one is not None and (one.bits, one.group, one.is_float) == kind for one in forms) else None


def _slab(codes: StoredCodes, columns: int) -> int:
    return next((size for size in SLABS if codes.group >= columns or codes.group % size == 0), 0)


def _joined(parts: Parts, quantised_as: QuantisedAs) -> StoredCodes | None:
    """What is true of all of them; None where they are not all of one kind."""
    found = [_codes(part, quantised_as(part)) for part in parts]
    joined = [one for one in found if one is not None]
    if len(joined) < len(found) or len({(one.bits, one.group, one.is_float) for one in joined}) > 1:
        return None
    first, columns = joined[0], parts[0].wanted[1]
    return replace(
        first,
        symmetric=all(one.symmetric for one in joined),
        may_be_sorted=any(one.may_be_sorted for one in joined) and first.group < columns,
    )


def _codes(part: Part, found: QuantisedMatrix | None) -> StoredCodes | None:
    return None if found is None or not part.has_whole_rows else found.codes


def num_experts(spec: ModelSpec) -> list[int]:
    """Of each layer, that this process has; 1 of dense ones."""
    return [layer.mlp.experts.num_held if layer.mlp.experts else 1 for layer in spec.layers]


def kept_slots(spec: ModelSpec, tensors: TensorMap, quantised_as: QuantisedAs) -> list[tuple[Parts, StoredCodes]]:
    """The joined matrices that are multiplied as codes, as far as is known before they are read."""
    found = ((parts, common_form(parts, quantised_as)) for parts in slots_of(spec, tensors))
    return [(parts, form) for parts, form in found if form is not None]


def decoded_slots(spec: ModelSpec, tensors: TensorMap, quantised_as: QuantisedAs) -> list[tuple[Parts, StoredCodes]]:
    """The joined matrices that are decoded where nothing is multiplied as codes, as far as is known before."""
    found = ((parts, decoded_form(parts, quantised_as)) for parts in slots_of(spec, tensors))
    return [(parts, form) for parts, form in found if form is not None]


def gpu_weights(
    spec: ModelSpec, tensors: TensorMap, quantised_as: QuantisedAs
) -> list[tuple[list[Parts], StoredCodes]]:
    """The weights that Triton's kernels decode, as far as is known before: joined matrices, of experts one for each."""
    found = ((weights, gpu_form(weights, quantised_as)) for weights in weights_of(spec, tensors))
    return [(weights, form) for weights, form in found if form is not None]


def slots_of(spec: ModelSpec, tensors: TensorMap) -> Iterator[Parts]:
    """The matrices of layers, as they are joined, and a head of its own."""
    for weights in weights_of(spec, tensors):
        yield from weights


def weights_of(spec: ModelSpec, tensors: TensorMap) -> Iterator[list[Parts]]:
    """The same, where those of all experts of a layer are together."""
    if tensors.head is not None:
        yield [(tensors.head,)]
    for count, layer in zip(num_experts(spec), tensors.layers, strict=True):
        for slot, parts in layer.items():
            if len(parts[0].wanted) != 2 or slot in EXACT_SLOTS:
                continue
            each = len(parts) // count if slot.startswith("experts_") else len(parts)
            yield [parts[at : at + each] for at in range(0, len(parts), each)]


def packed_bytes(parts: Parts, kept: StoredCodes) -> int:
    """What kept codes take in memory; of asymmetric ones scales are wider, and zeros are there."""
    rows, columns = sum(part.wanted[0] for part in parts), parts[0].wanted[1]
    rows = -(-rows // PANEL) * PANEL
    if kept.bits == 8:
        return rows * (columns + 8)
    return rows * columns // 2 + rows * math.ceil(columns / kept.group) * (2 if kept.symmetric else 6)


def decoded_bytes(parts: Parts, kept: StoredCodes) -> int:
    """The most that codes which are decoded take in memory: scales may be narrower."""
    rows, columns = sum(part.wanted[0] for part in parts), parts[0].wanted[1]
    rows = -(-rows // PANEL) * PANEL
    return rows * columns * kept.bits // 8 + rows * math.ceil(columns / kept.group) * (4 if kept.symmetric else 5)


def gpu_bytes(weights: Sequence[Parts], kept: StoredCodes) -> int:
    """The most that a weight which Triton's kernels decode takes in memory: experts' scales of 16 bits stay so narrow,
    which is known of powers of two before they are read."""
    rows, columns = sum(part.wanted[0] for parts in weights for part in parts), weights[0][0].wanted[1]
    block = _slab(kept, columns) * WORD_BITS // kept.bits
    scale = (2 if kept.powers and len(weights) > 1 else 4) + (0 if kept.is_float else 1)  # and a zero of integers
    return rows * (math.ceil(columns / block) * block * kept.bits // 8 + math.ceil(columns / kept.group) * scale)
