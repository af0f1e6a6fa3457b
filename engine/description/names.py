"""Where a family's checkpoints keep each slot of a description, and how it differs from what the slot wants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A matrix or vector of one slot: a stored tensor, or a piece of one."""

    name: str
    shape: Shape  # as it is stored
    expert: int | None = None  # index of a stored stack of experts
    transposed: bool = False  # stored as [in_features, out_features]
    rows: slice | None = None  # of the matrix, after it was transposed
    head_order: tuple[int, ...] | None = None  # of the dimensions of each head
    head_rows: int = 0  # that are stored of each head, where `head_order` takes some of more than it names
    absorbed: bool = False  # its rows, once taken, are columns: a map of keys that queries go through backwards
    plus_one: bool = False  # stored as what is added to one
    cut: slice | None = None  # of the rows that the slot wants, after all of that: those of one rank of a group
    columns: slice | None = None  # of the input features that the slot wants: those of one rank that adds with others

    @property
    def is_whole(self) -> bool:
        """Whether the stored tensor is just what the slot wants."""
        if self.transposed or self.absorbed or self.plus_one:
            return False
        pieces = (self.expert, self.rows, self.head_order, self.cut, self.columns)
        return all(piece is None for piece in pieces)

    @property
    def has_whole_rows(self) -> bool:
        """Whether the slot gets rows of the matrix with all their input features, as codes are taken."""
        return not self.absorbed and self.columns is None

    @property
    def wanted(self) -> Shape:
        """The shape of what the slot gets."""
        shape = self.shape if self.expert is None else self.shape[1:]
        if self.transposed:
            shape = shape[::-1]
        if self.rows is not None:
            shape = (len(range(*self.rows.indices(shape[0]))), *shape[1:])
        if self.head_rows and self.head_order is not None:
            shape = (shape[0] // self.head_rows * len(self.head_order), *shape[1:])
        if self.cut is not None:
            shape = (len(range(*self.cut.indices(shape[0]))), *shape[1:])
        if self.columns is not None:
            shape = (shape[0], len(range(*self.columns.indices(shape[1]))))
        return shape[::-1] if self.absorbed else shape


Parts = tuple[Part, ...]  # one below the other
LayerParts = Mapping[str, Parts]  # by slot; a bias has the slot of its weight and `.bias` behind it


@dataclass(frozen=True, slots=True, kw_only=True)
class NameTable:
    """The names that one family's checkpoints use; `slots` are modules of a layer, joined in this order.

    A module of experts has `{expert}` in its name, or it is one stored stack of all experts.
    """

    slots: Mapping[str, tuple[str, ...]]
    prefix: str = "model."
    embedding: str = "embed_tokens"
    positions: str = ""
    norm: str = "norm"
    head: str = "lm_head"  # stands outside the prefix
    classifier: str = "score"  # the same
    layer: str = "layers.{layer}."
    transposed: bool = False  # linears of the layers are stored as [in_features, out_features]
    norms_plus_one: bool = False  # norms are stored as what is added to one
    experts_transposed: bool = False  # of a stack
    experts_interleaved: bool = False  # rows of gate and up take turns in a stack
    unused: tuple[str, ...] = ()  # beginnings of names that a text model has no use for

    def layer_prefix(self, index: int) -> str:
        return self.prefix + self.layer.format(layer=index)


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpNames:
    """Of the layer behind a family's own that drafts: its modules, and what it does otherwise than others."""

    count_key: str  # of config.json: how many such layers there are
    prefix: str  # `{layer}`: the number of the family's own layers
    layer: str  # of the decoder layer, behind the prefix
    embedding_norm: str
    hidden_norm: str
    combine: str
    norm: str
    feeds_normed: bool  # the next position reads what is behind the last norm
    skips_first: bool = False  # the embedding that position 0 reads is zero


@dataclass(frozen=True, slots=True)
class TensorMap:
    """All parts of one model under one table's names."""

    table: NameTable
    embedding: Part
    positions: Part | None
    norm: LayerParts  # slots `norm` and `norm.bias`
    head: Part | None  # None: the embedding's
    layers: tuple[LayerParts, ...] = field(repr=False)
    classifier: Part | None = None

    def parts(self) -> Iterator[Part]:
        alone = (self.embedding, self.positions, self.head, self.classifier)
        yield from (part for part in alone if part is not None)
        for slots in (self.norm, *self.layers):
            for parts in slots.values():
                yield from parts

    def shapes(self) -> dict[str, Shape]:
        """Of the stored tensors, by name."""
        return {part.name: part.shape for part in self.parts()}
