"""Where the tensors of a draft head are, under the names that its files use."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from engine.description.draft_head import HeadSpec
from engine.description.families import FAMILIES
from engine.description.families.dense import LLAMA_SLOTS
from engine.description.names import LayerParts, NameTable, Part, Parts, Shape, TensorMap
from engine.description.spec import ModelSpec
from engine.description.tensors import map_tensors
from shared.errors import ModelError

EAGLE_NAMES = NameTable(slots=LLAMA_SLOTS, prefix="")
# Spellings of the same modules; a name is looked at from its beginning.
SPELLINGS = (
    ("model.", ""),
    ("midlayer.", "layers.0."),
    ("transformer.", "layers.0."),
    ("fusion_fc.", "fc."),
)
FLOATS = ("F32", "F16", "BF16", "F64")
IDS, IS_DRAFTED = "d2t", "t2d"  # offsets from ids of drafts to the target's; which of the target's are among them
IGNORED = (IS_DRAFTED, "rotary_emb", "embed_tokens.", "lm_head.", "verifier_")


@dataclass(frozen=True, slots=True)
class HeadTensors:
    """`layers` has the decoder's part; what stands around it is in `around`, by slot."""

    layers: TensorMap
    around: LayerParts
    own_embedding: bool
    own_head: bool
    ids: str = ""  # name of the offsets; empty: drafts have the target's ids

    def parts(self) -> Iterator[Part]:
        for slots in (*self.layers.layers, self.around):
            for parts in slots.values():
                yield from parts
        if self.own_embedding:
            yield self.layers.embedding
        if self.own_head and self.layers.head is not None:
            yield self.layers.head


def check_tensors(
    spec: HeadSpec, tensors: HeadTensors, target: ModelSpec, stored: Mapping[str, tuple[str, Shape]]
) -> None:
    """`stored`: what headers say of each tensor's format and shape.  Raises ModelError for the first that is wrong."""
    parts, hidden, vocab = list(tensors.parts()), spec.hidden_size, spec.layers.vocab_size
    if missing := sorted({part.name for part in parts} - stored.keys()):
        raise ModelError(f"{', '.join(missing[:3])} ({len(missing)} tensors) of an {spec.title} head are missing")
    for part in parts:
        dtype, shape = stored[part.name]
        if dtype not in FLOATS:
            raise ModelError(f"tensor {part.name} is in {dtype}; draft heads are read in 16 or 32 bits")
        if shape != part.shape:
            raise ModelError(f"tensor {part.name} has shape {list(shape)}, expected {list(part.shape)}")
    if not tensors.own_embedding and hidden != target.hidden_size:
        raise ModelError(f"hidden_size is {hidden}; the model's, whose embedding it reads, is {target.hidden_size}")
    if not tensors.own_head and vocab != target.vocab_size:
        raise ModelError(f"lm_head.weight is missing, for a vocabulary of {vocab} drafts")
    if not tensors.own_head and hidden != target.hidden_size:
        raise ModelError(f"lm_head.weight is missing, and hidden_size is {hidden}; the model's is {target.hidden_size}")
    if not tensors.ids and vocab != target.vocab_size:
        raise ModelError(f"draft_vocab_size is {vocab}; the model has {target.vocab_size} tokens, and there is no d2t")
    if tensors.ids and stored[tensors.ids][1] != (vocab,):
        raise ModelError(f"tensor {tensors.ids} has shape {list(stored[tensors.ids][1])}, expected [{vocab}]")


def plain_name(name: str) -> str:
    """A tensor's name in one spelling."""
    for found, meant in SPELLINGS:
        if name.startswith(found):
            name = meant + name.removeprefix(found)
    return name


def map_head(spec: HeadSpec, target: ModelSpec, found: Collection[str]) -> HeadTensors:
    """Raises ModelError for tensors that an EAGLE head should not have; what is lacking shows when it is looked up."""
    return _mtp(spec, target, found) if spec.in_checkpoint else _eagle(spec, found)


def _eagle(spec: HeadSpec, found: Collection[str]) -> HeadTensors:
    described = map_tensors(spec.layers, EAGLE_NAMES)
    own_embedding, own_head = described.embedding.name in found, spec.beside and "lm_head.weight" in found
    layers = described.layers
    if spec.beside:
        first = dict(layers[0])
        first["qkv"] = tuple(replace(part, shape=(part.shape[0], 2 * spec.hidden_size)) for part in first["qkv"])
        layers = (first, *layers[1:])
    mapped = replace(described, layers=layers, head=described.head if own_head else None)
    tensors = HeadTensors(mapped, dict(_around(spec, found)), own_embedding, own_head, IDS if IDS in found else "")
    known = {part.name for part in tensors.parts()} | {tensors.ids}
    surplus = sorted(name for name in found if name not in known and not name.startswith(IGNORED))
    if surplus:
        listed = ", ".join(surplus[:3])
        raise ModelError(f"{listed} ({len(surplus)} tensors) are not {spec.title}'s with this config.json")
    return tensors


def _around(spec: HeadSpec, found: Collection[str]) -> Iterator[tuple[str, Parts]]:
    hidden, read = spec.hidden_size, spec.captured_size
    slot, columns = ("fuse", read) if spec.fused else ("combine", 2 * hidden)
    yield slot, (Part("fc.weight", (hidden, columns)),)
    if "fc.bias" in found:
        yield f"{slot}.bias", (Part("fc.bias", (hidden,)),)
    if spec.capture_norm == "whole":
        yield "capture_norm", (Part("input_norm.weight", (read,)),)
    elif spec.capture_norm == "each":
        each = range(len(spec.captures))
        yield "capture_norm", tuple(Part(f"fc_norm.{index}.weight", (spec.target_hidden,)) for index in each)
    if spec.embedding_norm:
        yield "embedding_norm", (Part("layers.0.input_layernorm.weight", (hidden,)),)
    if spec.hidden_norm:
        yield "hidden_norm", (Part("layers.0.hidden_norm.weight", (hidden,)),)
    if spec.final_norm:
        yield "norm", (Part("norm.weight", (hidden,)),)


def _mtp(spec: HeadSpec, target: ModelSpec, found: Collection[str]) -> HeadTensors:
    """The embedding and the head are the target's: where a checkpoint has them again, they are copies."""
    family = FAMILIES[target.architecture]
    assert family.mtp is not None
    names, hidden = family.mtp, spec.hidden_size
    prefix = names.prefix.format(layer=target.num_layers)
    tables = [replace(table, prefix=prefix, layer=names.layer) for table in family.names]
    maps = [map_tensors(spec.layers, table) for table in tables]
    described = min(maps, key=lambda one: len({part.name for part in one.parts()} - set(found)))
    plus_one = described.table.norms_plus_one
    norms = {"embedding_norm": names.embedding_norm, "hidden_norm": names.hidden_norm, "norm": names.norm}
    around: dict[str, Parts] = {
        slot: (Part(f"{prefix}{name}.weight", (hidden,), plus_one=plus_one),) for slot, name in norms.items()
    }
    around["combine"] = (Part(f"{prefix}{names.combine}.weight", (hidden, 2 * hidden)),)
    return HeadTensors(replace(described, head=None), around, own_embedding=False, own_head=False)
