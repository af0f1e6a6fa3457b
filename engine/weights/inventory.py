"""Which of a checkpoint's tensors make a description's parts: names, shapes and formats, checked before any is read.

Needs no torch: commands check this before they start processes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path

from engine.description.names import Part, Shape, TensorMap
from engine.description.reading import tensors_of
from engine.description.spec import ModelSpec
from engine.weights.quantised.form import KEY, PLAIN, Form, Matrix, Quantisation, StoredCodes
from shared.errors import ModelError

IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")  # left by old exporters; never weights
NAMED_AT_MOST = 5  # tensors in one error message
KV_KEY_NAMES = ("self_attn.k_scale", "self_attn.k_proj.k_scale", "self_attn.k_proj.output_scale")
KV_VALUE_NAMES = ("self_attn.v_scale", "self_attn.v_proj.v_scale", "self_attn.v_proj.output_scale")
KV_UNUSED_NAMES = ("self_attn.q_scale",)  # queries are not quantised here
WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What the header of a file says of one tensor."""

    dtype: str  # as safetensors calls it: F16, I32, ...
    shape: Shape
    path: Path


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    """One stored matrix, or a stack of them, and the tensors that it is made of."""

    module: str
    form: Form
    matrix: Matrix
    suffixes: tuple[str, ...]  # of the tensors that the checkpoint has

    @property
    def names(self) -> list[str]:
        return [self.module + suffix for suffix in self.suffixes]

    @property
    def codes(self) -> StoredCodes:
        return self.form.codes(self.matrix, self.suffixes)


@dataclass(frozen=True, slots=True)
class Inventory:
    tensors: TensorMap
    plain: Mapping[str, Shape]  # by name; what stands for a quantised part is left out
    quantised: Mapping[str, QuantisedMatrix]  # by the name of the part
    zero_biases: tuple[str, ...]  # of quantised linears that have none; their contents have to be zero

    @property
    def names(self) -> list[str]:
        """Of all tensors that are read."""
        return [*self.plain, *(name for one in self.quantised.values() for name in one.names), *self.zero_biases]

    @property
    def num_elements(self) -> int:
        """Of the model's parts, each once, in whatever format."""
        return sum(math.prod(shape) for shape in self.tensors.shapes().values())


def is_kv_scale(name: str) -> bool:
    """Whether a checkpoint's tensor is no weight, but says how keys and values are quantised."""
    return name.endswith((*KV_KEY_NAMES, *KV_VALUE_NAMES, *KV_UNUSED_NAMES))


def take_inventory(
    directory: Path, spec: ModelSpec, quantisation: Quantisation | None, found: Mapping[str, StoredTensor]
) -> Inventory:
    """Raises ModelError naming the file, the tensor and what is wrong of it."""
    spelt = found.keys() if quantisation is None else _weight_names(found)
    tensors = _with_tied_head(spec, tensors_of(spec, spelt), spelt)
    expected = tensors.shapes()
    quantised: dict[str, QuantisedMatrix] = {}
    if quantisation is not None:
        transposed = {part.name for part in tensors.parts() if part.transposed}
        for name, shape in expected.items():
            if len(shape) >= 2 and not _is_plain(found.get(name)):
                quantised[name] = _matrix(name, shape, quantisation, found, is_transposed=name in transposed)
    plain = {name: shape for name, shape in expected.items() if name not in quantised}
    missing = sorted(plain.keys() - found.keys())
    if missing:
        raise ModelError(f"{directory} lacks {listing(missing)} of the {len(expected)} tensors of {spec.architecture}")
    biases = tuple(
        bias for one in quantised.values() if (bias := f"{one.module}.bias") in found and bias not in expected
    )
    inventory = Inventory(tensors, plain, quantised, biases)
    _check_surplus(directory, spec, tensors, found.keys() - set(inventory.names))
    for name, shape in plain.items():
        _check_plain(name, found[name], shape)
    return inventory


def _weight_names(found: Mapping[str, StoredTensor]) -> Set[str]:
    """The names that a checkpoint's matrices would have without quantisation: what spellings are told apart by."""
    modules = {name.rpartition(".")[0] for name in found}
    stacks = {name.removesuffix("_blocks") for name in found if name.endswith("_blocks")}
    return {*found, *(f"{module}{WEIGHT}" for module in modules), *stacks}


def _with_tied_head(spec: ModelSpec, tensors: TensorMap, found: Set[str]) -> TensorMap:
    """Of a tied pair, whichever is there stands for the embedding."""
    head = f"{tensors.table.head}{WEIGHT}"
    if spec.tie_word_embeddings and head in found and tensors.embedding.name not in found:
        return replace(tensors, embedding=Part(head, tensors.embedding.shape))
    return tensors


def _is_plain(stored: StoredTensor | None) -> bool:
    return stored is not None and stored.dtype in PLAIN


def _matrix(
    name: str, shape: Shape, quantisation: Quantisation, found: Mapping[str, StoredTensor], *, is_transposed: bool
) -> QuantisedMatrix:
    """A matrix that is not there as a plain tensor."""
    module = name.removesuffix(WEIGHT)
    form = quantisation.choice.form_of(module)
    if form is None:
        there = f", and it is stored as {found[name].dtype}" if name in found else ""
        raise ModelError(f"tensor {name} is missing: {KEY} leaves {module} in 16 bits{there}")
    experts, rows, columns = shape if len(shape) > 2 else (0, *shape)
    matrix = Matrix(columns, rows, experts) if is_transposed else Matrix(rows, columns, experts)
    try:
        wanted = form.stored(matrix)
    except ModelError as error:
        raise ModelError(f"tensor {name} of shape {list(shape)} in {quantisation.method}: {error}") from error
    suffixes = []
    for names, tensors in wanted.items():
        suffix = next((one for one in names.split("|") if module + one in found), None)
        if suffix is None:
            if tensors.optional:
                continue
            either = " or ".join(module + one for one in names.split("|"))
            raise ModelError(f"tensor {either} is missing: {KEY} says that {module} is in {quantisation.method}")
        stored = found[module + suffix]
        if stored.dtype not in tensors.dtypes:
            _refuse(module + suffix, stored, f"has dtype {stored.dtype}, expected {' or '.join(tensors.dtypes)}")
        if stored.shape not in tensors.shapes:
            either = " or ".join(str(list(one)) for one in tensors.shapes)
            _refuse(module + suffix, stored, f"has shape {list(stored.shape)}, expected {either} ({form.label})")
        suffixes.append(suffix)
    return QuantisedMatrix(module, form, matrix, tuple(suffixes))


def _check_plain(name: str, stored: StoredTensor, shape: Shape) -> None:
    if stored.shape != shape:
        _refuse(name, stored, f"has shape {list(stored.shape)}, expected {list(shape)}")
    if stored.dtype not in PLAIN:
        _refuse(name, stored, f"has dtype {stored.dtype}, expected a floating-point one")


def _refuse(name: str, stored: StoredTensor, text: str) -> None:
    raise ModelError(f"{stored.path}: tensor {name} {text}")


def _check_surplus(directory: Path, spec: ModelSpec, tensors: TensorMap, others: Set[str]) -> None:
    table = tensors.table
    behind = (table.layer_prefix(spec.num_layers + index) for index in range(spec.unused_layers))
    tied = (f"{table.head}.",) if spec.tie_word_embeddings else ()  # the embedding is there
    unused = (*table.unused, *behind, *tied)
    others = {name for name in others if not name.endswith(IGNORED_SUFFIXES)}
    extra = sorted(name for name in others if not is_kv_scale(name) and not name.startswith(unused))
    if extra:
        raise ModelError(f"{directory} has {listing(extra)}, which {spec.architecture} with this config.json has not")


def listing(names: list[str]) -> str:
    shown = ", ".join(names[:NAMED_AT_MOST])
    rest = len(names) - NAMED_AT_MOST
    return f"{shown} and {rest} more" if rest > 0 else shown
