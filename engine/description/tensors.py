"""The tensors of a description: every part of every slot, with its shape, under the names of a family's table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from engine.description.delta_tensors import delta_parts
from engine.description.names import NameTable, Part, Parts, TensorMap
from engine.description.spec import NO_ROPE, AttentionSpec, DeltaNetSpec, ExpertsSpec, LatentSpec, LayerSpec, ModelSpec

PER_HEAD_SLOTS = ("key_up", "value_up")  # whose parts are a matrix each


def map_tensors(spec: ModelSpec, table: NameTable) -> TensorMap:
    matrix = (spec.vocab_size, spec.hidden_size)
    positions = None
    if spec.learned_positions:
        shape = (spec.max_position_embeddings, spec.hidden_size)
        positions = Part(f"{table.prefix}{table.positions}.weight", shape)
    return TensorMap(
        table=table,
        embedding=Part(f"{table.prefix}{table.embedding}.weight", matrix),
        positions=positions,
        norm=dict(_norm(spec, table, "norm", table.prefix + table.norm, spec.hidden_size)),
        head=None if spec.tie_word_embeddings else Part(f"{table.head}.weight", matrix),
        layers=tuple(
            dict(_LayerParts(spec, layer, table, table.layer_prefix(index)).slots())
            for index, layer in enumerate(spec.layers)
        ),
        classifier=Part(f"{table.classifier}.weight", (len(spec.labels), spec.hidden_size)) if spec.labels else None,
    )


def _norm(
    spec: ModelSpec, table: NameTable, slot: str, name: str, size: int, order: tuple[int, ...] | None = None
) -> Iterator[tuple[str, Parts]]:
    yield slot, (Part(f"{name}.weight", (size,), plus_one=table.norms_plus_one, head_order=order),)
    if spec.norm.kind == "layer":
        yield f"{slot}.bias", (Part(f"{name}.bias", (size,)),)


class _LayerParts:
    """The slots of one layer."""

    def __init__(self, spec: ModelSpec, layer: LayerSpec, table: NameTable, prefix: str) -> None:
        self._spec = spec
        self._layer = layer
        self._table = table
        self._prefix = prefix

    def slots(self) -> Iterator[tuple[str, Parts]]:
        layer, hidden = self._layer, self._spec.hidden_size
        norms = ("input_norm", "attention_norm", "mlp_norm", "mlp_output_norm")
        for slot in norms:
            if getattr(layer, slot):
                yield from _norm(self._spec, self._table, slot, self._name(slot), hidden)
        if layer.scaled:
            yield "scale", (Part(self._name("scale"), (1,)),)
        if isinstance(layer.attention, DeltaNetSpec):
            yield from delta_parts(layer.attention, self._table, self._prefix, hidden)
        else:
            yield from self._attention(layer.attention)
        mlp = layer.mlp
        if mlp.experts is not None:
            yield from self._experts(mlp.experts)
        if mlp.inner:
            slots = ("gate_up", "down") if mlp.experts is None else ("shared_gate_up", "shared_down")
            rows = (mlp.inner, mlp.inner) if mlp.gated else (mlp.inner,)
            yield from self._linear("gate_up", slots[0], rows, hidden, bias=mlp.bias)
            yield from self._linear("down", slots[1], (hidden,), mlp.inner, bias=mlp.bias)

    def _attention(self, a: AttentionSpec) -> Iterator[tuple[str, Parts]]:
        hidden = self._spec.hidden_size
        if a.latent is not None:
            yield from self._latent(a, a.latent)
            return
        queries, keys = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        order = None if a.rope == NO_ROPE else self._spec.ropes[a.rope].head_order(a.head_dim)
        rows = (queries, keys, keys)
        if a.keys_are_values:
            query, key = (f"{self._prefix}{name}.weight" for name in self._table.slots["qkv"][:2])
            given = Part(query, (queries, hidden), head_order=order), Part(key, (keys, hidden), head_order=order)
            yield "qkv", (*given, Part(key, (keys, hidden), rows=slice(keys)))
        elif a.gated:
            yield from self._gated_qkv(a, order)
        else:
            yield from self._linear("qkv", "qkv", rows, hidden, bias=a.qkv_bias, orders=(order, order, None))
        yield from self._linear("output", "output", (hidden,), queries, bias=a.output_bias)
        if a.qk_norm:
            sizes = (a.head_dim, a.head_dim) if a.qk_norm == "head" else (queries, keys)
            for slot, size in zip(("query_norm", "key_norm"), sizes, strict=True):
                name = f"{self._name(slot)}.weight"
                yield slot, (Part(name, (size,), plus_one=self._table.norms_plus_one, head_order=order),)
        if a.sinks:
            yield "sinks", (Part(self._name("sinks"), (a.num_heads,)),)

    def _gated_qkv(self, a: AttentionSpec, order: tuple[int, ...] | None) -> Iterator[tuple[str, Parts]]:
        """Queries, keys, values, and the gates; a stored head of queries has the gates of its results behind it."""
        dims = a.head_dim
        query, key, value = (self._prefix + name for name in self._table.slots["qkv"])
        both = 2 * a.num_heads * dims
        for suffix in (".weight", ".bias") if a.qkv_bias else (".weight",):
            width = (self._spec.hidden_size,) if suffix == ".weight" else ()
            stored = Part(query + suffix, (both, *width), head_order=order or tuple(range(dims)), head_rows=2 * dims)
            keys = (a.num_kv_heads * dims, *width)
            yield (
                "qkv" + suffix.removeprefix(".weight"),
                (
                    stored,
                    Part(key + suffix, keys, head_order=order),
                    Part(value + suffix, keys),
                    replace(stored, head_order=tuple(range(dims, 2 * dims))),
                ),
            )

    def _latent(self, a: AttentionSpec, latent: LatentSpec) -> Iterator[tuple[str, Parts]]:
        hidden, width = self._spec.hidden_size, latent.plain + latent.rotated
        turned = self._spec.ropes[a.rope].head_order(latent.rotated)
        query_order, latent_order = (_behind(plain, turned) for plain in (latent.plain, latent.rank))
        name, queries = self._name, a.num_heads * width
        first = name("query_down") if latent.query_rank else name("query")
        columns = latent.query_rank or hidden
        given = Part(f"{first}.weight", (latent.query_rank or queries, hidden))
        cached = Part(f"{name('latent')}.weight", (a.head_dim, hidden), head_order=latent_order)
        if latent.query_rank:
            yield "query_norm", (Part(f"{name('query_norm')}.weight", (latent.query_rank,)),)
            yield "query_up", (Part(f"{name('query_up')}.weight", (queries, columns), head_order=query_order),)
        else:
            given = replace(given, head_order=query_order)
        yield "qkv", (given, cached)
        yield "key_norm", (Part(f"{name('key_norm')}.weight", (latent.rank,)),)
        up, each = f"{name('key_value_up')}.weight", latent.plain + latent.value_dim
        whole, starts = (a.num_heads * each, latent.rank), range(0, a.num_heads * each, each)
        keys = (Part(up, whole, rows=slice(at, at + latent.plain), absorbed=True) for at in starts)
        yield "key_up", tuple(keys)
        yield "value_up", tuple(Part(up, whole, rows=slice(at + latent.plain, at + each)) for at in starts)
        yield from self._linear("output", "output", (hidden,), a.num_heads * latent.value_dim, bias=False)

    def _linear(
        self,
        slot: str,
        names: str,  # the slot of the table
        rows: tuple[int, ...],  # of each of the matrices that the slot joins
        columns: int,
        *,
        bias: bool,
        orders: tuple[tuple[int, ...] | None, ...] = (),
    ) -> Iterator[tuple[str, Parts]]:
        modules = [self._prefix + name for name in self._table.slots[names]]
        orders = orders or (None,) * len(rows)
        yield slot, self._joined(modules, ".weight", rows, columns, orders)
        if bias:
            yield f"{slot}.bias", self._joined(modules, ".bias", rows, 0, orders)

    def _joined(
        self, modules: list[str], suffix: str, rows: tuple[int, ...], columns: int, orders: tuple[object, ...]
    ) -> Parts:
        """Parts of a module each, or all of one module that has them one below the other; without columns a vector."""
        transposed = self._table.transposed and columns > 0

        def shape(count: int) -> tuple[int, ...]:
            if not columns:
                return (count,)
            return (columns, count) if transposed else (count, columns)

        if len(modules) == len(rows):
            each = zip(modules, rows, orders, strict=True)
            return tuple(
                Part(name + suffix, shape(n), transposed=transposed, head_order=order)  # type: ignore[arg-type]
                for name, n, order in each
            )
        (module,) = modules
        whole, parts, start = shape(sum(rows)), [], 0
        if len(rows) == 3 and not any(orders):  # queries, keys and values, in the order that they are wanted in
            return (Part(module + suffix, whole, transposed=transposed),)
        for count, order in zip(rows, orders, strict=True):
            piece = slice(start, start + count)
            parts.append(Part(module + suffix, whole, transposed=transposed, rows=piece, head_order=order))  # type: ignore[arg-type]
            start += count
        return tuple(parts)

    def _experts(self, experts: ExpertsSpec) -> Iterator[tuple[str, Parts]]:
        hidden = self._spec.hidden_size
        router = self._name("router")
        yield "router", (Part(f"{router}.weight", (experts.count, hidden)),)
        if experts.router_bias:
            yield "router.bias", (Part(f"{router}.bias", (experts.count,)),)
        if experts.correction:
            yield "correction", (Part(self._name("correction"), (experts.count,)),)
        if experts.shared_gate:
            yield "shared_gate", (Part(f"{self._name('shared_gate')}.weight", (1, hidden)),)
        both = 2 if self._layer.mlp.gated else 1
        yield from self._stack("experts_gate_up", experts, (experts.inner,) * both, hidden)
        yield from self._stack("experts_down", experts, (hidden,), experts.inner)

    def _stack(
        self, slot: str, experts: ExpertsSpec, rows: tuple[int, ...], columns: int
    ) -> Iterator[tuple[str, Parts]]:
        """Of every expert the parts of `rows`, one expert after the other."""
        modules = [self._prefix + name for name in self._table.slots[slot]]
        each = range(experts.count)
        if "{expert}" in modules[0]:
            found = [
                Part(f"{name.format(expert=expert)}.weight", (count, columns))
                for expert in each
                for name, count in zip(modules, rows, strict=True)
            ]
            yield slot, tuple(found)
            return
        (module,) = modules
        stacked = [part for expert in each for part in self._pieces(module, experts.count, expert, rows, columns)]
        yield slot, tuple(stacked)
        if experts.bias:
            name = f"{module}_bias"
            yield f"{slot}.bias", tuple(p for e in each for p in self._pieces(name, experts.count, e, rows, 0))

    def _pieces(self, name: str, count: int, expert: int, rows: tuple[int, ...], columns: int) -> Iterator[Part]:
        """One expert's parts of a stack; without columns a vector's."""
        table, total = self._table, sum(rows)
        transposed = table.experts_transposed and columns > 0
        matrix = (columns, total) if transposed else (total, columns)
        shape = (count, *matrix) if columns else (count, total)
        for index, size in enumerate(rows):
            by_turns, behind = slice(index, None, len(rows)), slice(index * size, (index + 1) * size)
            piece = by_turns if table.experts_interleaved else behind
            yield Part(name, shape, expert, transposed, None if len(rows) == 1 else piece)

    def _name(self, slot: str) -> str:
        (name,) = self._table.slots[slot]
        return self._prefix + name


def _behind(plain: int, order: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The order of a vector's last dimensions as one of all; the `plain` ones before them stay."""
    return None if order is None else (*range(plain), *(plain + place for place in order))
