"""An adapter's files as what it adds to each linear of a described model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from engine.description.names import Part, TensorMap
from engine.description.spec import AttentionSpec, ModelSpec
from engine.lora.config import WEIGHTS_NAME, LoraConfig
from engine.lora.content import read_content
from engine.weights.pieces import rows_of_part
from kernels.ops.linears.lora import LoraPart
from shared.errors import ModelError

SLOTS = ("qkv", "output", "gate_up", "down")  # in the order of kernels/cpu/native/steps/lora.h
MAX_RANK = 256
_PREFIX = "base_model.model."

_BASE = ".base_layer.weight"  # of an embedding or a head, which PEFT stores beside what is added to it

_LINEAR, _EMBEDDING = ("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B")
Slots = Mapping[str, tuple[LoraPart, ...]]  # by slot, one of each matrix that the slot joins
Take = Callable[[Part], Tensor]  # one of the base model's own


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """What it adds to each layer; a slot that it leaves alone is absent."""

    digest: str  # of the files' content
    max_rank: int
    dtype: torch.dtype  # float32, or bfloat16 where all its tensors are
    directory: Path
    layers: tuple[Slots, ...] = field(repr=False)
    embedding: LoraPart | None = field(default=None, repr=False)  # A [rank, vocab_size], B [hidden_size, rank]
    head: LoraPart | None = field(default=None, repr=False)

    @property
    def parts(self) -> list[LoraPart]:
        """All that add something."""
        own = [part for slots in self.layers for parts in slots.values() for part in parts]
        return [part for part in (*own, self.embedding, self.head) if part is not None and part.rank]


def read_adapter(
    directory: Path,
    spec: ModelSpec,
    tensors: TensorMap,
    *,
    max_rank: int = MAX_RANK,
    take: Take | None = None,
) -> LoraAdapter:
    """Raises ModelError naming the file and the key, tensor or shape that is at fault.

    `tensors`: the base model's, or a rank's parts of them, of which the adapter's are then too: output features are
    cut, and input features whole, but for an embedding, whose tokens are cut.  `take` reads the base model's embedding
    or head where the adapter's file has a copy of it, which must be the same.
    """
    content = read_content(directory)
    config, stored = content.config, content.tensors
    copies = {name: stored.pop(name) for name in list(stored) if name.endswith(_BASE)}
    reader = _Reader(config, _pairs(stored), max_rank)
    dtype = torch.bfloat16 if all(one.dtype == torch.bfloat16 for one in stored.values()) else torch.float32
    layers = reader.layers(spec, tensors)
    embedding, head = reader.ends(tensors)
    _check_copies(copies, tensors, take)
    found = LoraAdapter(content.digest, 0, dtype, directory, layers, embedding, head)
    return replace(found, max_rank=max(part.rank for part in found.parts))


def _check_copies(copies: Mapping[str, Tensor], tensors: TensorMap, take: Take | None) -> None:
    """Of the base model's weights: what was trained with another embedding is not served over this one."""
    known = {_module(part): part for part in (tensors.embedding, tensors.head) if part is not None}
    known.setdefault(tensors.table.head, tensors.embedding)
    for name, tensor in copies.items():
        part = known.get(_end_in(name.removesuffix(_BASE), set(known)))
        own = None if part is None or take is None else take(replace(part, cut=None))
        if own is None or own.shape != tensor.shape or not torch.equal(own.to(tensor), tensor):
            raise ModelError(f"{WEIGHTS_NAME}: {name} is not the base model's own")


def _pairs(stored: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """By module, its A and B."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in stored.items():
        module, _, which = name.removesuffix(".weight").rpartition(".")
        served = _LINEAR if name.endswith(".weight") else _EMBEDDING
        if which not in served:
            raise ModelError(f"{WEIGHTS_NAME}: {name} is not served: only lora_A and lora_B are, and an embedding's")
        if not tensor.is_floating_point() or tensor.ndim != 2:
            raise ModelError(f"{WEIGHTS_NAME}: {name} is {tensor.dtype} {list(tensor.shape)}; a matrix is wanted")
        found.setdefault(module.removeprefix(_PREFIX), {})[which] = tensor
    if not found:
        raise ModelError(f"{WEIGHTS_NAME} has no tensors")
    return found


class _Reader:
    def __init__(self, config: LoraConfig, pairs: dict[str, dict[str, Tensor]], max_rank: int) -> None:
        self._config = config
        self._pairs = pairs
        self._max_rank = max_rank

    def ends(self, tensors: TensorMap) -> tuple[LoraPart | None, LoraPart | None]:
        """What is added to the embedding, and to the head: to one that is tied its own or nothing, as it is to PEFT,
        or, if the configuration ties what is added too, the embedding's."""
        embedding, head = self._end(_module(tensors.embedding)), self._end(_head_name(tensors))
        vocab_size, hidden_size = replace(tensors.embedding, cut=None).wanted
        own = tensors.embedding.cut or slice(None)  # tokens of this rank
        first = None if embedding is None else self._add(embedding, hidden_size, vocab_size, _EMBEDDING)
        last = None if head is None else self._add(head, vocab_size, hidden_size, _LINEAR)
        for name, found in ((_module(tensors.embedding), first), (_head_name(tensors), last)):
            ties = self._config.ties_weights and name != _module(tensors.embedding)
            if found is None and not ties and self._config.targets_by_name(name):
                raise ModelError(f"target_modules: {name} is targeted, and {WEIGHTS_NAME} has no tensors of it")
        if last is None and first is not None and self._config.ties_weights and tensors.head is None:
            assert first.down is not None
            assert first.up is not None
            last = LoraPart(vocab_size, first.up.t().contiguous(), first.down.t().contiguous(), first.scale)
        if first is not None and first.down is not None:
            first = replace(first, down=first.down[:, own].contiguous())
        if last is not None and last.up is not None:
            up = last.up[own].contiguous()
            last = replace(last, out_features=len(up), up=up)
        return first, last

    def _end(self, name: str) -> str | None:
        """The adapter's name of the embedding or the head; None where it leaves that alone."""
        return next((module for module in self._pairs if _ends_in(module, name) or _ends_in(name, module)), None)

    def layers(self, spec: ModelSpec, tensors: TensorMap) -> tuple[Slots, ...]:
        served = _served(spec, tensors)
        known = {name.removeprefix(tensors.table.prefix) for name in served}
        own: dict[str, str] = {}  # the model's name of a module -> the adapter's
        ends = {self._end(_module(tensors.embedding)), self._end(_head_name(tensors))}
        for module in self._pairs:
            if module in ends:
                is_tied = self._config.ties_weights and tensors.head is None
                if not self._config.targets(module) and not is_tied:
                    raise ModelError(f"target_modules: {module} has tensors and is not targeted")
                continue
            short = _end_in(module, known)
            if not short:
                raise ModelError(f"target_modules: {module} is no linear of this model that adapters are served for")
            if not self._config.targets(module):
                raise ModelError(f"target_modules: {module} has tensors and is not targeted")
            own[tensors.table.prefix + short] = module
        self._check_complete(served, own)
        return tuple(
            {
                slot: tuple(self._part(part, own.get(_module(part))) for part in parts[slot])
                for slot in SLOTS
                if any(_module(part) in own for part in parts.get(slot, ()))
            }
            for parts in tensors.layers
        )

    def _check_complete(self, served: set[str], own: Mapping[str, str]) -> None:
        """All modules that are targeted have tensors, but where the configuration leaves some out."""
        if self._config.targets_part:
            return
        for module in sorted(served - own.keys()):
            if self._config.targets(module):
                raise ModelError(f"target_modules: {module} is targeted, and {WEIGHTS_NAME} has no tensors of it")

    def _part(self, part: Part, module: str | None) -> LoraPart:
        out_features = part.wanted[0]
        if module is None:
            return LoraPart(out_features)
        outer, inner = part.shape[::-1] if part.transposed else part.shape
        found = self._add(module, outer, inner, _LINEAR)
        assert found.up is not None
        return replace(found, out_features=out_features, up=rows_of_part(part, found.up).contiguous())

    def _add(self, module: str, outer: int, inner: int, names: tuple[str, str]) -> LoraPart:
        """B [outer, rank] and A [rank, inner], under the names of such tensors."""
        pair = self._pairs[module]
        for which in names:
            if which not in pair:
                raise ModelError(f"{WEIGHTS_NAME}: {module} has no {which}")
        down, up = (pair[which] for which in names)
        rank = self._config.rank_of(module)
        if rank > self._max_rank:
            raise ModelError(f"r: {module} has rank {rank}; max_lora_rank is {self._max_rank}")
        for which, tensor, shape in ((names[0], down, (rank, inner)), (names[1], up, (outer, rank))):
            if tuple(tensor.shape) != shape:
                raise ModelError(
                    f"{WEIGHTS_NAME}: {module}.{which} has shape {list(tensor.shape)}, the base model and r want "
                    f"{list(shape)}"
                )
        return LoraPart(outer, down.contiguous(), up.contiguous(), self._config.scale_of(module))


def _module(part: Part) -> str:
    return part.name.removesuffix(".weight")


def _head_name(tensors: TensorMap) -> str:
    return tensors.table.head if tensors.head is None else _module(tensors.head)


def _served(spec: ModelSpec, tensors: TensorMap) -> set[str]:
    """The modules that adapters may change: linears of attention and of MLPs, of any layer that has both plain."""
    found = set()
    for layer, parts in zip(spec.layers, tensors.layers, strict=True):
        slots = list(SLOTS)
        if not isinstance(layer.attention, AttentionSpec) or layer.attention.latent is not None:
            slots = slots[2:]
        if layer.mlp.experts is not None:
            slots = [slot for slot in slots if slot in SLOTS[:2]]
        found |= {_module(part) for slot in slots for part in parts.get(slot, ()) if part.expert is None}
    return found


def _ends_in(module: str, name: str) -> bool:
    return module == name or module.endswith(f".{name}")


def _end_in(module: str, known: set[str]) -> str:
    """The end of a module's name that is known; empty where none is."""
    rest = module
    while rest and rest not in known:
        rest = rest.partition(".")[2]
    return rest
