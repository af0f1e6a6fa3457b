"""Embeddings as bodies have them: shortened, and packed as text in the type and order of bytes that is asked for."""

from __future__ import annotations

import base64
import math
import struct
import sys
from array import array
from bisect import bisect_left

from services.gateway.http.requests.reading import field_error

DTYPES = ("float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2")
PACKED = ("base64", "bytes", "bytes_only")  # of encoding_format
ORDERS = {"native": "<" if sys.byteorder == "little" else ">", "little": "<", "big": ">"}
MAX_HALF = 65504.0


def check_packing(encoding: str | None, dtype: str | None, endianness: str | None) -> None:
    """Raise RequestError on what cannot be packed; without base64 there is nothing to pack."""
    if dtype is not None and dtype not in DTYPES:
        raise field_error("embed_dtype", f"must be one of {', '.join(DTYPES)}")
    if endianness is not None and endianness not in ORDERS:
        raise field_error("endianness", f"must be one of {', '.join(ORDERS)}")
    for name, value in (("embed_dtype", dtype), ("endianness", endianness)):
        if value is not None and encoding not in PACKED:
            raise field_error(name, f"can only be given with encoding_format {', '.join(PACKED)}")


def shortened(vector: array[float], dimensions: int | None, *, normalize: bool) -> array[float]:
    """The first components, of length 1 again where whole vectors are.  Raises RequestError on more than there are."""
    if dimensions is None or dimensions == len(vector):
        return vector
    if not 1 <= dimensions <= len(vector):
        raise field_error("dimensions", f"must be between 1 and {len(vector)}, got {dimensions}")
    kept = vector[:dimensions]
    norm = math.sqrt(math.fsum(value * value for value in kept)) if normalize else 0.0
    return array("f", [value / norm for value in kept]) if norm else kept


def packed(vector: array[float], dtype: str | None, endianness: str | None) -> bytes:
    """The components; by default float32 in the machine's own order."""
    order, count = ORDERS[endianness or "native"], len(vector)
    match dtype or "float32":
        case "float16":
            return struct.pack(f"{order}{count}e", *(max(-MAX_HALF, min(MAX_HALF, value)) for value in vector))
        case "bfloat16":
            words = struct.unpack(f"<{count}I", struct.pack(f"<{count}f", *vector))
            return struct.pack(f"{order}{count}H", *(_rounded(word) for word in words))
        case "fp8_e4m3":
            return bytes(_nearest(value, E4M3) for value in vector)
        case "fp8_e5m2":
            return bytes(_nearest(value, E5M2) for value in vector)
    return struct.pack(f"{order}{count}f", *vector)


def packed_text(vector: array[float], dtype: str | None, endianness: str | None) -> str:
    """The same as base64."""
    return base64.b64encode(packed(vector, dtype, endianness)).decode()


def _eight_bits(mantissa: int, bias: int, count: int) -> list[float]:
    """The first numbers of 8 bits that are not negative, by their codes: without infinity and NaN, `count` of them."""
    found = []
    for code in range(count):
        exponent, fraction = code >> mantissa, (code & (1 << mantissa) - 1) / (1 << mantissa)
        found.append(math.ldexp(fraction + (exponent > 0), max(exponent, 1) - bias))
    return found


E4M3, E5M2 = _eight_bits(3, 7, 127), _eight_bits(2, 15, 124)


def _nearest(value: float, numbers: list[float]) -> int:
    """The code of the nearest of the numbers, ties to even; beyond the largest it is that."""
    size, sign = abs(value), 0x80 if math.copysign(1.0, value) < 0 else 0
    above = min(bisect_left(numbers, size), len(numbers) - 1)
    near = range(max(above - 1, 0), above + 1)
    return sign | min(near, key=lambda code: (abs(size - numbers[code]), code & 1))


def _rounded(word: int) -> int:
    """The upper half of a float32, rounded to the nearest, ties to even."""
    return min(0xFFFF, (word + 0x7FFF + (word >> 16 & 1)) >> 16)
