"""What a checkpoint's configuration files say of its weights, checked before anything is allocated.

The scheme is in config.json, or, of older writers, in a file of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine.description.keys import read_object
from engine.weights.quantised.auto_round import read_auto_round
from engine.weights.quantised.awq import read_awq
from engine.weights.quantised.compressed_tensors import read_compressed_tensors
from engine.weights.quantised.form import KEY, Quantisation, SchemeKeys
from engine.weights.quantised.fp8 import read_fp8
from engine.weights.quantised.gptq import read_gptq
from engine.weights.quantised.modelopt import read_modelopt
from engine.weights.quantised.mxfp4 import read_mxfp4
from shared.errors import ModelError

READERS: dict[str, Callable[[SchemeKeys], Quantisation]] = {
    "gptq": read_gptq,
    "awq": read_awq,
    "auto-round": read_auto_round,
    "compressed-tensors": read_compressed_tensors,
    "fp8": read_fp8,
    "mxfp4": read_mxfp4,
    "modelopt": read_modelopt,
}
OTHER_NAMES = {"auto_round": "auto-round", "intel/auto-round": "auto-round", "modelopt_fp4": "modelopt"}
# file of a scheme -> the method that it is of where it does not say, and the key that holds it
FILES = {
    "quantize_config.json": ("gptq", ""),
    "quant_config.json": ("awq", ""),
    "hf_quant_config.json": ("modelopt", "quantization"),
}


def read_quantisation(directory: Path) -> Quantisation | None:
    """None: no weight is quantised.  Raises ModelError naming the file and key."""
    path = directory / "config.json"
    raw = read_object(path)
    found = scheme_of(raw)
    if found is not None:
        return _parsed(path, found, KEY)
    for name, (method, key) in FILES.items():
        path = directory / name
        if not path.is_file():
            continue
        content = read_object(path)
        scheme = content.get(key) if key else content
        if not isinstance(scheme, dict):
            raise ModelError(f"{path}: {key} is missing or not an object")
        return _parsed(path, {"quant_method": method} | scheme, key or name)
    return None


def scheme_of(raw: Mapping[str, Any]) -> Any:
    """Of a config.json's content; None where it has none."""
    text = raw.get("text_config")
    places = [raw, text] if isinstance(text, dict) else [raw]
    found = (place.get(key) for place in places for key in (KEY, "compression_config"))
    return next((scheme for scheme in found if scheme is not None), None)


def _parsed(path: Path, scheme: Any, key: str) -> Quantisation | None:
    try:
        return parse_scheme(scheme, key)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


def parse_scheme(scheme: Any, path: str = KEY) -> Quantisation | None:
    """The content of `quantization_config`, checked; None where it is for a KV cache alone."""
    if not isinstance(scheme, dict):
        raise ModelError(f"{path} must be an object, got {scheme!r}")
    keys = SchemeKeys(scheme, path)
    implied = None if keys.get("config_groups") is None else "compressed-tensors"  # of some of its writers
    method = keys.get("quant_method") or implied
    method = OTHER_NAMES.get(str(method), method)
    if method not in READERS:
        raise keys.fault("quant_method", f"is {method!r}, which is not served; served: {', '.join(READERS)}")
    _check_kv_cache(keys)
    only_cache = {"modelopt": "quant_algo", "compressed-tensors": "config_groups"}
    if method in only_cache and not keys.get(only_cache[method]):
        if keys.get("kv_cache_quant_algo") is None and keys.get("kv_cache_scheme") is None:
            raise keys.fault(only_cache[method], "is missing")
        return None
    return READERS[method](keys)


def _check_kv_cache(keys: SchemeKeys) -> None:
    """Of schemes of a KV cache that of E4M3 with static scales is served."""
    keys.one_of("kv_cache_quant_algo", ("FP8", None))
    cache = keys.object("kv_cache_scheme")
    if not cache.raw:
        return
    cache.one_of("num_bits", (8,))
    cache.one_of("type", ("float",))
    if cache.get("dynamic"):
        raise cache.fault("dynamic", f"is {cache.get('dynamic')!r}; static scales are served")
