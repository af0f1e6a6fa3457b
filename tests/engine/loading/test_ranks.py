"""How a model is cut into ranks, and how these agree on what they have."""

from __future__ import annotations

import dataclasses
import socket

import msgspec
import pytest
import torch

from engine.description.ranks import PANEL, Place, cut_spec, cut_tensors, why_not_cut
from engine.description.reading import parse_config
from engine.description.spec import ModelSpec
from engine.loading.memory import MemoryPlan, WindowPlan
from engine.loading.ranks import GroupStart, RankReady, agree, smallest
from engine.weights.plain import DummyWeights
from services.worker.groups.rank_processes import own_gpu
from shared.config import load_settings
from shared.errors import ConfigError, FatalError
from shared.messages.fingerprint import Fingerprint
from shared.ranks.channel import Channel

PANELS = "panels of 32 features, and each rank needs one"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 112,
    "intermediate_size": 144,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "vocab_size": 211,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "eos_token_id": 2,
}


def spec_of(**changes: object) -> ModelSpec:
    return parse_config({**CONFIG, **changes})


def ready(rank: int, num_blocks: int = 40, **changes: object) -> RankReady:
    made = RankReady(rank, "", Fingerprint(weights="aa", dtype="float32"), num_blocks, 640, [(11, 9 + rank)])
    return msgspec.structs.replace(made, **changes)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_parts_of_all_ranks_are_the_whole(count: int) -> None:
    spec = spec_of()
    source = DummyWeights(spec)
    places = [Place(rank, count) for rank in range(count)]
    cut = [cut_tensors(spec, source.tensors, place) for place in places]
    for layer, whole in enumerate(source.tensors.layers):
        for slot, parts in whole.items():
            for index, part in enumerate(parts):
                pieces = [source.take(one.layers[layer][slot][index]) for one in cut]
                if "norm" in slot:
                    assert all(torch.equal(piece, source.take(part)) for piece in pieces)
                else:
                    assert torch.equal(torch.cat(pieces), source.take(part)), slot
    rows = [one.embedding.wanted[0] for one in cut]
    assert sum(rows) == 211 and all(row % PANEL == 0 for row in rows[:-1]) and min(rows) > 0
    heads = [[(one.num_heads, one.num_kv_heads) for one in cut_spec(spec, place).attentions] for place in places]
    assert [sum(pair[0] for pair in each) for each in zip(*heads, strict=True)] == [9, 9]
    assert all(queries == 3 * keys for rank in heads for queries, keys in rank)


@pytest.mark.parametrize(
    ("changes", "ranks", "reason"),
    [
        ({}, 3, ""),
        ({}, 4, "tensor_parallel_size is 4, but the model has 3 KV heads, of which a rank needs one"),
        ({"hidden_size": 64}, 3, f"tensor_parallel_size is 3, but hidden_size 64 is only 2 {PANELS}"),
        ({"intermediate_size": 32}, 2, f"tensor_parallel_size is 2, but intermediate_size 32 is only 1 {PANELS}"),
        ({"architectures": ["Olmo2ForCausalLM"]}, 2, "norms over all heads together are not cut into ranks"),
    ],
)
def test_what_cannot_be_cut_is_said_in_a_line(changes: dict[str, object], ranks: int, reason: str) -> None:
    assert why_not_cut(spec_of(**changes), ranks) == reason


MIXTURE = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 96,
    "decoder_sparse_step": 1,
}


@pytest.mark.parametrize("count", [2, 3])
def test_whole_experts_are_divided_among_ranks(count: int) -> None:
    """Shared ones are cut, as dense layers are."""
    spec = spec_of(**MIXTURE)
    source = DummyWeights(spec)
    places = [Place(rank, count, whole_experts=True) for rank in range(count)]
    cut = [cut_tensors(spec, source.tensors, place) for place in places]
    for layer, whole in enumerate(source.tensors.layers):
        for slot in ("experts_gate_up", "experts_down"):
            assert sum((one.layers[layer][slot] for one in cut), ()) == whole[slot]
        assert all(one.layers[layer]["router"] == whole["router"] for one in cut)
        assert [one.layers[layer]["gate_up"][0].cut for one in cut] == [place.share(96, PANEL) for place in places]
    for layer in range(spec.num_layers):
        mixtures = [cut_spec(spec, place).layers[layer].mlp.experts for place in places]
        held = [one.held for one in mixtures if one is not None]
        assert sum(held, ()) == tuple(range(5)) and min(map(len, held)) == 5 // count
        for one in mixtures:
            assert one is not None and one.count == 5
            assert one.holders == tuple(1 << rank for rank, own in enumerate(held) for _ in own)
    assert repr(cut_spec(spec, places[0])).count("held") == 0, "fingerprints are of the model alone"


@pytest.mark.parametrize(
    ("changes", "ranks", "reason"),
    [
        ({}, 2, "enable_expert_parallel is set, but the model has no experts"),
        (MIXTURE, 3, ""),
        (
            {**MIXTURE, "num_experts": 2},
            3,
            "tensor_parallel_size is 3, but the model has 2 experts, of which a rank needs one with "
            "enable_expert_parallel",
        ),
    ],
)
def test_experts_that_cannot_be_divided_are_said_in_a_line(changes: dict[str, object], ranks: int, reason: str) -> None:
    assert why_not_cut(spec_of(**changes), ranks, whole_experts=True) == reason


def test_one_process_has_no_experts_to_divide() -> None:
    with pytest.raises(ConfigError, match=r"^enable_expert_parallel needs tensor_parallel_size above 1"):
        load_settings({"enable_expert_parallel": True}, environ={})


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"kernels": "torch", "pipeline_parallel_size": 2}, "needs native kernels on a CPU, but kernels is 'torch'"),
        ({"device": "cuda", "pipeline_parallel_size": 2}, "needs native kernels on a CPU, but device is 'cuda'"),
        (
            {"lora_modules": "a=/a", "pipeline_parallel_size": 2},
            "lora_modules .* a pipeline .* has no adapters",
        ),
        (
            {"lora_modules": "a=/a", "kernels": "torch"},
            "lora_modules .* with torch have no adapters",
        ),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
        ({"tensor_parallel_reduce": True}, "^tensor_parallel_reduce needs ranks that compute with torch"),
        ({"enable_dbo": True}, "^enable_dbo needs ranks that compute with torch"),
        ({"enable_dbo": True, "kernels": "torch", "tensor_parallel_size": 1}, "^enable_dbo needs ranks that compute"),
        ({"dbo_token_threshold": 0}, "^dbo_token_threshold must be at least 1, got 0"),
        ({"enable_sequence_parallel": True, "kernels": "torch"}, "^enable_sequence_parallel is for native kernels"),
        ({"enable_expert_parallel": True, "device": "cuda"}, "^enable_expert_parallel is for native kernels"),
        ({"attention_backend": "flashinfer", "device": "cuda"}, "^attention_backend 'flashinfer' does not serve"),
        ({"executor": "ray", "kernels": "torch"}, "^executor is 'ray', which places no ranks that compute with torch"),
    ],
)
def test_settings_that_a_group_cannot_have(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_settings({"tensor_parallel_size": 2, **wrong}, environ={})


def test_what_gives_the_residual_is_cut_by_input_features_where_ranks_add() -> None:
    """Each rank has some columns of these; their biases are whole, and are added once."""
    spec = spec_of(mlp_bias=True)
    source = DummyWeights(spec)
    cut = [cut_tensors(spec, source.tensors, Place(rank, 3, reduces=True)) for rank in range(3)]
    for layer, whole in enumerate(source.tensors.layers):
        for slot in ("output", "down", "output.bias", "down.bias"):
            if slot not in whole:
                continue
            parts = [one.layers[layer][slot][0] for one in cut]
            pieces = [source.take(part) for part in parts]
            assert [part.wanted for part in parts] == [tuple(piece.shape) for piece in pieces]
            known = source.take(whole[slot][0])
            if slot.endswith("bias"):
                assert all(torch.equal(piece, known) for piece in pieces)
            else:
                assert torch.equal(torch.cat(pieces, dim=1), known) and not parts[0].is_whole
    assert [one.layers[0]["qkv"] for one in cut] == [
        cut_tensors(spec, source.tensors, Place(rank, 3)).layers[0]["qkv"] for rank in range(3)
    ]


def test_a_rank_has_one_of_the_gpus_that_the_leader_sees() -> None:
    assert [own_gpu(rank, {}) for rank in (1, 2)] == [{"CUDA_VISIBLE_DEVICES": "1"}, {"CUDA_VISIBLE_DEVICES": "2"}]
    visible = {"CUDA_VISIBLE_DEVICES": "4,GPU-7"}
    assert own_gpu(1, visible) == {"CUDA_VISIBLE_DEVICES": "GPU-7"}
    assert own_gpu(2, visible) == {"CUDA_VISIBLE_DEVICES": ""}


def test_a_group_has_what_its_smallest_rank_has() -> None:
    start = agree([ready(0), ready(1, 30), ready(2, 35, max_model_len=600)], 4096)
    assert (start.num_blocks, start.max_model_len, start.sliding, start.num_bytes) == (30, 600, [(11, 9)], 4096)
    plan = MemoryPlan(40, 16, 1, 640, (WindowPlan(11, 12, 1),))
    assert smallest(plan, start) == dataclasses.replace(
        plan, num_blocks=30, max_model_len=600, sliding=(WindowPlan(11, 9, 1),)
    )


def test_what_ranks_have_agreed_on_is_in_the_digest_that_their_steps_begin_with() -> None:
    seeds = {agree([ready(0, count), ready(1)], size).digest for count, size in ((40, 1), (39, 1), (40, 2))}
    assert len(seeds) == 3


def test_ranks_with_other_weights_or_formats_are_refused() -> None:
    other = ready(2, fingerprint=Fingerprint(weights="bb", dtype="bfloat16"))
    with pytest.raises(ConfigError, match=r"^rank 2 differs from rank 0 in weights, dtype: all ranks need the same"):
        agree([ready(0), ready(1), other], 1)


def test_what_a_rank_cannot_do_is_the_groups_error() -> None:
    with pytest.raises(ConfigError, match=r"^rank 1: no room$"):
        agree([ready(0), RankReady(1, "no room")], 1)


def test_channels_keep_messages_apart_and_notice_the_end() -> None:
    mine, theirs = map(Channel, socket.socketpair())
    mine.send(ready(0))
    mine.send(ready(1))
    assert [theirs.receive(RankReady).rank for _ in range(2)] == [0, 1]
    mine.send(ready(0))
    with pytest.raises(FatalError, match="no GroupStart"):
        theirs.receive(GroupStart)
    mine.close()
    with pytest.raises(FatalError, match="has ended"):
        theirs.receive(RankReady)
    assert "has ended" in str(theirs.watch(1.0))
    theirs.close()
