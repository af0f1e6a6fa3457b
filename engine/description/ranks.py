"""How a model is cut for a group of ranks that compute it together: linears by output features, attention by KV heads.

No sum is cut, so a group computes what one process does, bit for bit.  Shares need not be equal: each rank has whole
KV heads, and output features in panels of the native kernels.  Experts are cut as other linears are, or each rank has
some of them whole.

Ranks that reduce (`Place.reduces`) cut the linears that give residuals by input features, and add what each makes of
them: fewer exchanges, and other bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from engine.description.names import LayerParts, Part, Parts, TensorMap
from engine.description.spec import AttentionSpec, ExpertsSpec, LayerSpec, ModelSpec

PANEL = 32  # output features that lie together in every build of the native kernels
HIDDEN_SLOTS = ("output", "down", "experts_down")  # whose outputs are added to the residual


@dataclass(frozen=True, slots=True)
class Place:
    """One rank of a group."""

    rank: int
    ranks: int
    whole_experts: bool = False  # it has some of a mixture's experts, and of others nothing
    redundant: int = 0  # experts that the ranks together have more than the mixture, each of another rank's
    reduces: bool = False  # ranks add partial sums of what is added to the residual

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def share(self, count: int, unit: int = 1) -> slice:
        """Of `count` things in whole units, the last of which may be smaller."""
        units = -(-count // unit)
        begin, end = (units * rank // self.ranks * unit for rank in (self.rank, self.rank + 1))
        return slice(begin, min(end, count))


def why_not_in_torch(spec: ModelSpec) -> str:
    """What keeps a model that can be cut from ranks that compute with torch; empty where nothing does."""
    if any(layer.mlp.experts for layer in spec.layers):
        return "mixtures of experts are cut into ranks on native kernels alone (kernels auto or native, on a CPU)"
    return ""


def why_not_cut(spec: ModelSpec, ranks: int, *, whole_experts: bool = False, redundant: int = 0) -> str:
    """What keeps a model from so many ranks; empty where nothing does."""
    heads = min((one.num_kv_heads for one in spec.attentions), default=0)
    if spec.has_states:
        return "layers of linear attention are not cut into ranks"
    if any(one.latent for one in spec.attentions):
        return "latent attention is not cut into ranks"
    if any(one.qk_norm == "whole" for one in spec.attentions):
        return "norms over all heads together are not cut into ranks"
    if ranks > heads:
        return f"tensor_parallel_size is {ranks}, but the model has {heads} KV heads, of which a rank needs one"
    inner = [layer.mlp.inner for layer in spec.layers if layer.mlp.inner]
    mixtures = [layer.mlp.experts for layer in spec.layers if layer.mlp.experts]
    if not whole_experts:
        inner += [experts.inner for experts in mixtures]
    elif not mixtures:
        return "enable_expert_parallel is set, but the model has no experts"
    elif ranks > (fewest := min(experts.count for experts in mixtures)):
        return (
            f"tensor_parallel_size is {ranks}, but the model has {fewest} experts, "
            "of which a rank needs one with enable_expert_parallel"
        )
    elif redundant > (most := fewest * (ranks - 1)):
        return f"num_redundant_experts is {redundant}, but {ranks} ranks of {fewest} experts have room for {most}"
    sizes = {"hidden_size": spec.hidden_size, "vocab_size": spec.vocab_size}
    if inner:
        sizes["intermediate_size"] = min(inner)
    for name, size in sizes.items():
        if -(-size // PANEL) < ranks:
            return (
                f"tensor_parallel_size is {ranks}, but {name} {size} is only {-(-size // PANEL)} panels of {PANEL} "
                "features, and each rank needs one"
            )
    return ""


def cut_spec(spec: ModelSpec, place: Place) -> ModelSpec:
    """The model with the rank's heads; all other sizes are those of the whole model."""
    return replace(spec, layers=tuple(_cut_layer(layer, place) for layer in spec.layers))


def _cut_layer(layer: LayerSpec, place: Place) -> LayerSpec:
    heads = layer.attention
    assert isinstance(heads, AttentionSpec)
    count = _length(place.share(heads.num_kv_heads))
    experts = layer.mlp.experts
    if experts is not None and place.whole_experts:
        every = all_held(experts, place)
        bits = (sum(1 << rank for rank, one in enumerate(every) if expert in one) for expert in range(experts.count))
        experts = replace(experts, holders=tuple(bits), held=every[place.rank])
    return replace(
        layer,
        attention=replace(heads, num_kv_heads=count, num_heads=count * heads.group),
        mlp=replace(layer.mlp, experts=experts),
    )


def all_held(experts: ExpertsSpec, place: Place) -> list[tuple[int, ...]]:
    """The experts that each rank has whole, in order, before any is moved: as many as others, or one less or more, one
    behind the other; then redundant ones, each where there are fewest."""
    shares = [replace(place, rank=rank).share(experts.count) for rank in range(place.ranks)]
    every = [set(range(share.start, share.stop)) for share in shares]
    copies = [1] * experts.count
    for _ in range(place.redundant):
        poorest = min((one for one in every if len(one) < experts.count), key=len)
        expert = min((one for one in range(experts.count) if one not in poorest), key=copies.__getitem__)
        poorest.add(expert)
        copies[expert] += 1
    return [tuple(sorted(one)) for one in every]


def widths(place: Place, count: int, unit: int = 1, size: int = 1) -> tuple[int, ...]:
    """Features of each rank, of `count` things of `size` features that are shared in whole units."""
    return tuple(size * _length(replace(place, rank=rank).share(count, unit)) for rank in range(place.ranks))


def first_heads(heads: AttentionSpec, place: Place) -> int:
    """Query heads of the whole model before the rank's."""
    return int(place.share(heads.num_kv_heads).start) * heads.group


def cut_tensors(spec: ModelSpec, tensors: TensorMap, place: Place) -> TensorMap:
    """The rank's parts of the whole model's tensors; each rank has something of every matrix."""
    vocabulary = place.share(spec.vocab_size, PANEL)
    both = zip(spec.layers, tensors.layers, strict=True)
    return replace(
        tensors,
        embedding=replace(tensors.embedding, cut=vocabulary),
        head=None if tensors.head is None else replace(tensors.head, cut=vocabulary),
        layers=tuple(dict(_cut_slots(spec, layer, parts, place)) for layer, parts in both),
    )


def _cut_slots(spec: ModelSpec, layer: LayerSpec, parts: LayerParts, place: Place) -> Iterator[tuple[str, Parts]]:
    heads = layer.attention
    assert isinstance(heads, AttentionSpec)
    hidden = place.share(spec.hidden_size, PANEL)
    inner = place.share(layer.mlp.inner, PANEL)
    keys = place.share(heads.num_kv_heads)
    queries = slice(keys.start * heads.group, keys.stop * heads.group)
    for slot, whole in parts.items():
        name = slot.removesuffix(".bias")
        if name == "qkv":
            yield slot, _cut_heads(heads, whole, queries, keys)
        elif layer.mlp.experts is not None and place.whole_experts and name.startswith("experts_"):
            each = len(whole) // layer.mlp.experts.count
            kept = all_held(layer.mlp.experts, place)[place.rank]
            yield slot, tuple(part for expert in kept for part in whole[expert * each : (expert + 1) * each])
        elif name in HIDDEN_SLOTS and place.reduces:
            features = _times(queries, heads.head_dim) if name == "output" else inner
            yield slot, whole if slot != name else tuple(replace(part, columns=features) for part in whole)
        elif name in HIDDEN_SLOTS:
            yield slot, tuple(replace(part, cut=hidden) for part in whole)
        elif name == "gate_up":
            yield slot, tuple(replace(part, cut=inner) for part in whole)
        elif name == "experts_gate_up" and layer.mlp.experts is not None:
            share = place.share(layer.mlp.experts.inner, PANEL)
            yield slot, tuple(replace(part, cut=share) for part in whole)
        elif name == "sinks":
            yield slot, tuple(replace(part, cut=queries) for part in whole)
        else:
            yield slot, whole


def _cut_heads(heads: AttentionSpec, parts: Parts, queries: slice, keys: slice) -> Parts:
    """Of queries, keys, values and, where there are any, gates; these may be one part, one below the other."""
    dims, counts = heads.head_dim, (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
    firsts = (0, counts[0], counts[0] + counts[1]) if len(parts) == 1 else (0, 0, 0, 0)
    each: list[Part] = list(parts) * 3 if len(parts) == 1 else list(parts)
    shares = (queries, keys, keys, queries)
    return tuple(
        replace(part, cut=slice((first + share.start) * dims, (first + share.stop) * dims))
        for part, first, share in zip(each, firsts, shares, strict=False)
    )


def _times(share: slice, size: int) -> slice:
    """Of things that have `size` features each."""
    return slice(share.start * size, share.stop * size)


def _length(share: slice) -> int:
    return int(share.stop - share.start)
