"""The structures and functions of native/pageant.h as ctypes has them: native.py alone uses them."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_uint64, c_void_p
from typing import Any

VERSION = 24  # PG_ABI
LORA_PARTS = 4  # PG_LORA_PARTS

RMS_NORM, LAYER_NORM = range(2)  # PgNormKind
SILU, GELU_TANH, CLAMPED_SWIGLU = range(3)  # PgActivation
PHASES = (  # PgPhase
    *("linears", "conversion", "scores", "softmax", "mixing", "attention's rest"),
    *("norms", "rotary and KV store", "waiting", "other", "adapters"),
)
SOFTMAX, SOFTMAX_OF_CHOSEN, SIGMOID = range(3)  # PgScore
ALIVE, LEFT, DISAGREED, NO_ROOM, RANK_DIED, RANK_SILENT = range(6)  # PgEnd


class PgCoding(Structure):
    _fields_ = [("format", c_int32), ("scales", c_int32), ("zeros", c_int32), ("decoded", c_int32)]


class PgLinear(Structure):
    _fields_ = [
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("n", c_int32),
        ("k", c_int32),
        ("format", c_int32),
        ("group", c_int32),
        ("gather", c_void_p),
        ("coding", PgCoding),
    ]


class PgNorm(Structure):
    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("kind", c_int32)]


class PgExperts(Structure):
    _fields_ = [
        ("count", c_int32),
        ("top_k", c_int32),
        ("inner", c_int32),
        ("score", c_int32),
        ("renormalise", c_int32),
        ("groups", c_int32),
        ("kept_groups", c_int32),
        ("group_best", c_int32),
        ("scale", c_float),
        ("correction", c_void_p),
        ("router", PgLinear),
        ("gate_up", POINTER(PgLinear)),
        ("down", POINTER(PgLinear)),
        ("shared_gate", PgLinear),
        ("holders", c_void_p),
        ("loads", c_void_p),
    ]


class PgExpertMove(Structure):
    _fields_ = [("expert", c_int64), ("source", c_int64), ("dropped", c_int64), ("target", c_int64)]


class PgDelta(Structure):
    _fields_ = [
        ("key_heads", c_int32),
        ("value_heads", c_int32),
        ("key_dim", c_int32),
        ("value_dim", c_int32),
        ("width", c_int32),
        ("gates", PgLinear),
        ("taps", c_void_p),
        ("rate", c_void_p),
        ("bias", c_void_p),
        ("norm", PgNorm),
        ("inputs", c_void_p),
        ("states", c_void_p),
    ]


class PgLatent(Structure):
    _fields_ = [
        ("rank", c_int32),
        ("rotated", c_int32),
        ("plain", c_int32),
        ("value_dim", c_int32),
        ("query_rank", c_int32),
        ("eps", c_float),
        ("query", PgLinear),
        ("key_up", POINTER(PgLinear)),
        ("value_up", POINTER(PgLinear)),
    ]


class PgLayer(Structure):
    _fields_ = [
        ("input_norm", PgNorm),
        ("attention_norm", PgNorm),
        ("mlp_norm", PgNorm),
        ("mlp_output_norm", PgNorm),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("query_norm", PgNorm),
        ("key_norm", PgNorm),
        ("norm_whole", c_int32),
        ("value_norm", PgNorm),
        ("qkv", PgLinear),
        ("output", PgLinear),
        ("latent", POINTER(PgLatent)),
        ("gate_up", PgLinear),
        ("down", PgLinear),
        ("experts", POINTER(PgExperts)),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("layer_scale", c_void_p),
        ("sinks", c_void_p),
        ("scale", c_float),
        ("softcap", c_float),
        ("window", c_int32),
        ("inner", c_int32),
        ("gated", c_int32),
        ("activation", c_int32),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("table", c_int64),
        ("attention_gate", c_int32),
        ("delta", POINTER(PgDelta)),
        ("key_scales", c_void_p),
        ("value_scales", c_void_p),
        ("first_attended", c_int32),
        ("first_inner", c_int32),
        ("first_expert", c_int32),
    ]


class PgLoraPart(Structure):
    _fields_ = [("down", c_void_p), ("up", c_void_p), ("rank", c_int32), ("n", c_int32), ("scale", c_float)]


class PgLora(Structure):
    _fields_ = [("parts", PgLoraPart * LORA_PARTS), ("num_parts", c_int32), ("format", c_int32)]


class PgGroup(Structure):
    _fields_ = [
        ("memory", c_void_p),
        ("bytes", c_int64),
        ("links", POINTER(c_int32)),
        ("rank", c_int32),
        ("ranks", c_int32),
        ("spins", c_int32),
        ("attended", c_int32),
        ("inner", c_int32),
        ("vocab", c_int32),
        ("joins", c_int32),
        ("sequence_parallel", c_int32),
        ("expert_bytes", c_int64),
        ("slot_bytes", c_int64),
        ("max_tokens", c_int64),
        ("max_seqs", c_int64),
        ("max_rows", c_int64),
        ("table_columns", c_int64),
        ("digest", c_uint64),
    ]


class PgModel(Structure):
    _fields_ = [
        ("num_layers", c_int32),
        ("hidden", c_int32),
        ("vocab", c_int32),
        ("block_size", c_int32),
        ("kv_format", c_int32),
        ("round_activations", c_int32),
        ("max_positions", c_int32),
        ("eps", c_float),
        ("embed_scale", c_float),
        ("residual_scale", c_float),
        ("logit_scale", c_float),
        ("logit_softcap", c_float),
        ("norm", PgNorm),
        ("head", PgLinear),
        ("embedding", c_void_p),
        ("embedding_format", c_int32),
        ("positions", c_void_p),
        ("layers", POINTER(PgLayer)),
        ("adapters", POINTER(POINTER(PgLora))),
        ("round_attention", c_int32),
        ("group", POINTER(PgGroup)),
        ("first_hidden", c_int32),
        ("first_vocab", c_int32),
    ]


class PgStep(Structure):
    _fields_ = [
        ("num_seqs", c_int64),
        ("rows", c_void_p),
        ("computed", c_void_p),
        ("scheduled", c_void_p),
        ("wanted", c_void_p),
        ("tokens", c_void_p),
        ("tables", c_void_p),
        ("tokens_stride", c_int64),
        ("tables_stride", c_int64),
        ("adapters", c_void_p),
        ("listed", c_void_p),
        ("inputs", c_void_p),
        ("beside", c_void_p),
        ("captured", c_void_p),
        ("num_captured", c_int64),
        ("captures", c_void_p),
    ]


class PgHead(Structure):
    _fields_ = [
        ("layers", POINTER(PgModel)),
        ("embedding", c_void_p),
        ("embedding_format", c_int32),
        ("vocab", c_int32),
        ("ids", c_void_p),
        ("captured", c_int32),
        ("captured_together", c_int32),
        ("capture_norm", PgNorm),
        ("embedding_norm", PgNorm),
        ("hidden_norm", PgNorm),
        ("norm", PgNorm),
        ("fuse", PgLinear),
        ("combine", PgLinear),
        ("norms_residual", c_int32),
        ("feeds_normed", c_int32),
        ("skips_first", c_int32),
    ]


class PgSampling(Structure):
    _fields_ = [
        ("temperature", c_void_p),
        ("seeds", c_void_p),
        ("top_k", c_void_p),
        ("depth", c_void_p),
        ("top_p", c_void_p),
    ]


class PgDrafting(Structure):
    _fields_ = [("captured", c_void_p), ("firsts", c_void_p), ("counts", c_void_p), ("sampling", PgSampling)]


class PgRows(Structure):
    _fields_ = [("rows", c_void_p), ("n", c_int64), ("sums", c_void_p)]


class PgCodes(Structure):
    _fields_ = [("codes", c_void_p), ("scales", c_void_p), ("zeros", c_void_p), ("n", c_int64)]


_MODEL, _STEP, _ROWS, _ADDRESS = POINTER(PgModel), POINTER(PgStep), POINTER(PgRows), c_void_p
_GROUP = POINTER(PgGroup)
_KV: list[Any] = [c_int32, c_int32, c_int32, c_int32]  # format, block_size, num_kv_heads, head_dim
_PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "pg_abi": (c_int32, []),
    "pg_target": (c_char_p, []),
    "pg_set_threads": (None, [c_int32, c_int32]),
    "pg_supports": (c_int32, [_MODEL]),
    "pg_packed_bytes": (c_int64, [c_int64, c_int64, c_int32, c_int32]),
    "pg_pack_linear": (None, [_ROWS, c_int32, c_int32, c_int32, c_int64, c_int32, c_int32, _ADDRESS]),
    "pg_pack_codes": (None, [POINTER(PgCodes), c_int32, c_int32, c_int64, c_int32, c_int32, _ADDRESS]),
    "pg_coded_bytes": (c_int64, [c_int64, c_int64, c_int32, POINTER(PgCoding)]),
    "pg_pack_coded": (c_int64, [POINTER(PgCodes), c_int32, c_int32, c_int64, c_int32, POINTER(PgCoding), _ADDRESS]),
    "pg_copy": (None, [_ADDRESS, c_int32, c_int64, c_int64, c_int32, _ADDRESS, _ADDRESS]),
    "pg_count": (None, [c_int32]),
    "pg_counted": (None, [_ADDRESS]),
    "pg_peak": (c_int64, [c_int32, c_int64]),
    "pg_read": (c_int64, [_ADDRESS, c_int64]),
    "pg_digest": (None, [_ADDRESS, c_int64, c_int64, _ADDRESS]),
    "pg_copy_checked": (c_int64, [_ADDRESS, _ADDRESS, c_int64]),
    "pg_key_bytes": (c_int64, _KV),
    "pg_value_bytes": (c_int64, _KV),
    "pg_forward": (None, [_MODEL, _STEP, _ADDRESS]),
    "pg_logits": (None, [_MODEL, _ADDRESS, c_int64, _ADDRESS, _ADDRESS]),
    "pg_greedy": (None, [_MODEL, _ADDRESS, c_int64, _ADDRESS, _ADDRESS]),
    "pg_extend": (None, [_MODEL, _STEP, c_int64, POINTER(PgSampling), _ADDRESS]),
    "pg_queue": (c_int64, [_MODEL, _STEP, POINTER(PgSampling), _ADDRESS, _ADDRESS]),
    "pg_await": (c_int32, [c_int64, _ADDRESS]),
    "pg_call": (None, [_ADDRESS]),
    "pg_draft": (None, [POINTER(PgHead), _STEP, POINTER(PgDrafting), _ADDRESS]),
    "pg_expert_bytes": (c_int64, [_MODEL]),
    "pg_slot_bytes": (c_int64, [_MODEL]),
    "pg_group_bytes": (c_int64, [_GROUP, c_int64]),
    "pg_group_state": (c_int32, [_GROUP]),
    "pg_group_end": (None, [_GROUP, c_int32]),
    "pg_group_logits": (c_void_p, [_MODEL]),
    "pg_group_copy": (None, [_MODEL, c_int64, _ADDRESS, c_int64]),
    "pg_group_move": (None, [_MODEL, c_int64, POINTER(PgExpertMove), c_int64]),
    "pg_follow": (c_int32, [_MODEL]),
    "pg_gather": (None, [_GROUP, c_int64, _ADDRESS, c_int64, c_int64, _ADDRESS]),
    "pg_linear": (None, [POINTER(PgLinear), c_int32, _ADDRESS, c_int64, _ADDRESS]),
    "pg_norm": (None, [POINTER(PgNorm), _ADDRESS, c_float, c_int64, c_int64, _ADDRESS]),
    "pg_store_kv": (None, [*_KV, _ADDRESS, _ADDRESS, _ADDRESS, c_int64, _ADDRESS, _ADDRESS]),
    "pg_attention": (None, [_MODEL, POINTER(PgLayer), _STEP, _ADDRESS, _ADDRESS]),
    "pg_feed_forward": (None, [_MODEL, POINTER(PgLayer), _ADDRESS, c_int64, _ADDRESS]),
    "pg_causal_conv": (None, [POINTER(PgDelta), _STEP, _ADDRESS]),
    "pg_delta_rule": (None, [POINTER(PgDelta), _STEP, _ADDRESS, _ADDRESS]),
    "pg_route": (None, [_MODEL, POINTER(PgLayer), _ADDRESS, c_int64, _ADDRESS, _ADDRESS]),
    "pg_lora": (None, [POINTER(POINTER(PgLora)), _ADDRESS, c_int64, c_int64, c_int64, c_int32, _ADDRESS]),
    "pg_lora_width": (c_int32, []),
    "pg_pack_lora": (None, [POINTER(PgLoraPart), c_int64, c_int32, _ADDRESS, _ADDRESS]),
    "pg_argmax": (None, [_ADDRESS, c_int64, c_int64, _ADDRESS]),
    "pg_gumbel_argmax": (None, [_ADDRESS, c_int64, c_int64, *[_ADDRESS] * 5]),
    "pg_truncation": (None, [_ADDRESS, c_int64, c_int64, *[_ADDRESS] * 5]),
}


def bind(library: ctypes.CDLL) -> ctypes.CDLL:
    """Give every function its types.  Raises AttributeError where one is missing."""
    for name, (result, arguments) in _PROTOTYPES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
