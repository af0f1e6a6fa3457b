"""How one matrix is stored: the tensors of its module, and how they are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from engine.description.names import Shape
from shared.errors import ModelError

if TYPE_CHECKING:
    from engine.weights.quantised.module_tensors import ModuleTensors
    from kernels.ops.linears.codes import Codes

SIXTEEN = ("F16", "BF16", "F32")  # formats of scales that are numbers; names are those of safetensors' headers
PLAIN = (*SIXTEEN, "F64")  # of a matrix that is not quantised
WIDTHS = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E8M0": 1}
KEY = "quantization_config"


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear's weight, or a stack of them."""

    rows: int  # output features
    columns: int  # input features
    experts: int = 0  # of a stack; 0: a single matrix


@dataclass(frozen=True, slots=True)
class Tensors:
    """What one of a module's tensors may look like."""

    dtypes: tuple[str, ...]
    shapes: tuple[Shape, ...]
    optional: bool = False


@dataclass(frozen=True, slots=True)
class StoredCodes:
    """What is known of codes before they are read."""

    bits: int  # 4 or 8
    group: int  # input features of a scale
    symmetric: bool  # all zeros are in the middle, or there are none
    may_be_sorted: bool = False  # a tensor says in which order input features are grouped
    is_float: bool = False  # E4M3 or E2M1; else integers
    powers: bool = False  # scales are powers of two


class Form(Protocol):
    """One way to store a matrix; frozen data, whose repr goes into fingerprints."""

    @property
    def label(self) -> str:
        """What a user calls it, with bits and groups."""
        ...

    def stored(self, matrix: Matrix) -> Mapping[str, Tensors]:
        """By what stands behind the module's name; of names between `|` a checkpoint has one.

        Raises ModelError for a matrix that cannot be stored so.
        """
        ...

    def codes(self, matrix: Matrix, suffixes: Sequence[str]) -> StoredCodes:
        """What the codes of a module that has these tensors are."""
        ...

    def read(self, tensors: ModuleTensors, matrix: Matrix) -> Codes:
        """Raises ModelError naming the tensor whose contents cannot be."""
        ...


class Choice(Protocol):
    """Which modules are stored how; frozen data too."""

    def form_of(self, module: str) -> Form | None:
        """None: the configuration leaves it in 16 or 32 bits."""
        ...


@dataclass(frozen=True, slots=True)
class Quantisation:
    """What config.json says of a checkpoint's weights."""

    method: str  # the name that users know
    choice: Choice
    rounds_activations: bool = False  # it was made for activations in 8 or 4 bits, which stay in 16 or 32 here


@dataclass(frozen=True, slots=True)
class Same:
    """All modules alike; those that have a plain weight are left as they are, whatever lists say."""

    form: Form

    def form_of(self, module: str) -> Form | None:
        return self.form


@dataclass(frozen=True, slots=True)
class SchemeKeys:
    """A scheme's keys, checked as they are read; errors name the key by its path."""

    raw: Mapping[str, Any]
    path: str = KEY

    def fault(self, key: str, text: str) -> ModelError:
        return ModelError(f"{self.path}.{key} {text}")

    def get(self, *keys: str) -> Any:
        """The first of them that is there and not null."""
        return next((self.raw[key] for key in keys if self.raw.get(key) is not None), None)

    def one_of(self, key: str, served: Sequence[Any], default: Any = None) -> Any:
        value = self.get(key)
        value = default if value is None else value
        if value not in served or isinstance(value, bool):
            raise self.fault(key, f"is {value!r}, which is not served; served: {', '.join(map(str, served))}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fault(key, f"must be true or false, got {value!r}")
        return value

    def object(self, key: str) -> SchemeKeys:
        """Empty where it is absent."""
        value = self.get(key)
        if value is None:
            return SchemeKeys({}, f"{self.path}.{key}")
        if not isinstance(value, dict):
            raise self.fault(key, f"must be an object, got {value!r}")
        return SchemeKeys(value, f"{self.path}.{key}")

    def objects(self, key: str) -> Iterator[tuple[str, SchemeKeys]]:
        """The objects of an object, by name."""
        whole = self.object(key)
        for name in whole.raw:
            yield name, whole.object(name)

    def names(self, key: str) -> tuple[str, ...]:
        value = self.get(key) or ()
        if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
            raise self.fault(key, f"must be a list of names, got {value!r}")
        return tuple(value)

    def group(self, *keys: str, default: int = 128) -> int:
        """Input features of a scale; -1: all."""
        value = self.get(*keys)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or (value != -1 and value < 1):
            raise self.fault(keys[0], f"must be -1 or a positive integer, got {value!r}")
        return value

    def bits(self, *keys: str, served: Sequence[int] = (4, 8)) -> int:
        value = self.get(*keys)
        if isinstance(value, bool) or value not in served:
            named = " or ".join(map(str, served))
            raise self.fault(keys[0], f"is {value!r}; quantised weights of {named} bits are served")
        return int(value)


def groups_of(matrix: Matrix, group: int) -> int:
    return 1 if group == -1 else -(-matrix.columns // group)


def describe_group(group: int) -> str:
    return "a scale per channel" if group == -1 else f"groups of {group}"


def words(count: int, bits: int, what: str) -> int:
    """32-bit words that hold `count` codes.  Raises ModelError where they do not fill them."""
    if count * bits % 32:
        raise ModelError(f"{count} {what} of {bits} bits fill no 32-bit words")
    return count * bits // 32
