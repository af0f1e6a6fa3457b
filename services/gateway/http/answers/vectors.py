"""Embeddings as bodies have them: shortened, and packed as text in the type and order of bytes that is asked for."""

from __future__ import annotations

import base64
import math
import struct
import sys
from array import array

from shared.errors import RequestError

DTYPES = ("float32", "float16", "bfloat16")
ORDERS = {"native": "<" if sys.byteorder == "little" else ">", "little": "<", "big": ">"}
MAX_HALF = 65504.0


def check_packing(encoding: str | None, dtype: str | None, endianness: str | None) -> None:
    """Raise RequestError on what cannot be packed; without base64 there is nothing to pack."""
    if dtype is not None and dtype not in DTYPES:
        raise RequestError(f"embed_dtype must be one of {', '.join(DTYPES)}", field="embed_dtype")
    if endianness is not None and endianness not in ORDERS:
        raise RequestError(f"endianness must be one of {', '.join(ORDERS)}", field="endianness")
    for name, value in (("embed_dtype", dtype), ("endianness", endianness)):
        if value is not None and encoding != "base64":
            raise RequestError(f"{name} can only be given with encoding_format=base64", field=name)


def shortened(vector: array[float], dimensions: int | None, *, normalize: bool) -> array[float]:
    """The first components, of length 1 again where whole vectors are.  Raises RequestError on more than there are."""
    if dimensions is None or dimensions == len(vector):
        return vector
    if not 1 <= dimensions <= len(vector):
        raise RequestError(f"dimensions must be between 1 and {len(vector)}, got {dimensions}", field="dimensions")
    kept = vector[:dimensions]
    norm = math.sqrt(math.fsum(value * value for value in kept)) if normalize else 0.0
    return array("f", [value / norm for value in kept]) if norm else kept


def packed(vector: array[float], dtype: str | None, endianness: str | None) -> str:
    """Base64 of the components; by default float32 in the machine's own order."""
    order, count = ORDERS[endianness or "native"], len(vector)
    match dtype or "float32":
        case "float16":
            data = struct.pack(f"{order}{count}e", *(max(-MAX_HALF, min(MAX_HALF, value)) for value in vector))
        case "bfloat16":
            words = struct.unpack(f"<{count}I", struct.pack(f"<{count}f", *vector))
            data = struct.pack(f"{order}{count}H", *(_rounded(word) for word in words))
        case _:
            data = struct.pack(f"{order}{count}f", *vector)
    return base64.b64encode(data).decode()


def _rounded(word: int) -> int:
    """The upper half of a float32, rounded to the nearest, ties to even."""
    return min(0xFFFF, (word + 0x7FFF + (word >> 16 & 1)) >> 16)
