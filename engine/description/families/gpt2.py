"""GPT-2: layer norms, learned positions, a plain MLP; linears are stored as [in_features, out_features]."""

from __future__ import annotations

from engine.description.families.dense import model
from engine.description.keys import ConfigKeys
from engine.description.names import NameTable
from engine.description.spec import NO_ROPE, AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec
from shared.errors import ModelError

SLOTS = {
    "input_norm": ("ln_1",),
    "qkv": ("attn.c_attn",),
    "output": ("attn.c_proj",),
    "mlp_norm": ("ln_2",),
    "gate_up": ("mlp.c_fc",),
    "down": ("mlp.c_proj",),
}
NAMES = tuple(
    NameTable(
        prefix=prefix, embedding="wte", positions="wpe", norm="ln_f", layer="h.{layer}.", slots=SLOTS, transposed=True
    )
    for prefix in ("transformer.", "")
)
# The names that GPT-2's configurations have for what others call otherwise.
KEYS = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}


def gpt2(c: ConfigKeys) -> ModelSpec:
    own = {theirs: c.raw.get(name) for theirs, name in KEYS.items() if c.raw.get(name) is not None}
    c = ConfigKeys({**c.raw, **own})
    c.only("activation_function", "gelu_new", "gelu_pytorch_tanh")
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        c.only(key, False)
    c.only("scale_attn_weights", True)
    hidden, heads = c.positive_int("hidden_size"), c.positive_int("num_attention_heads")
    if hidden % heads:
        raise ModelError(f"n_embd ({hidden}) is no multiple of n_head ({heads})")
    layer = LayerSpec(
        attention=AttentionSpec(
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=hidden // heads,
            rope=NO_ROPE,
            qkv_bias=True,
            output_bias=True,
        ),
        mlp=MlpSpec(inner=c.positive_int("n_inner", 4 * hidden), activation="gelu_tanh", gated=False, bias=True),
    )
    return model(
        c,
        "GPT2LMHeadModel",
        lambda index: layer,
        norm=NormSpec(kind="layer", eps=c.number("layer_norm_epsilon", 1e-5)),
        ropes=(),
        learned_positions=True,
        tie_word_embeddings=c.flag("tie_word_embeddings", True),
    )
