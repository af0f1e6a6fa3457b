"""Adapters in a group of ranks: each has what is added to its own output features, and no bit is another one's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.description.reading import read_config
from scripts.bench.common.adapters import write_adapter
from services.scheduler.state.policy import Policy
from tests.engine.checkpoints import save_checkpoint
from tests.integration.engine import MODEL, Ask, Engine, Output, ask
from tests.integration.ranks.grouped import GroupedEngine, over_tcp

NATIVE: dict[str, Any] = {"kernels": "native"}


def write_whole(base: Path, directory: Path, *, seed: int, **options: Any) -> Path:
    """One of all linears, and of embedding and head."""
    write_adapter(base, directory, seed=seed, **options)
    spec, chance = read_config(base), torch.Generator().manual_seed(seed)
    path, config = directory / "adapter_model.safetensors", directory / "adapter_config.json"
    tensors, said = load_file(path), json.loads(config.read_text())
    rank, dtype = said["r"], next(iter(tensors.values())).dtype
    for name, outer, inner, which in (
        ("model.embed_tokens", spec.hidden_size, spec.vocab_size, "lora_embedding_{}"),
        ("lm_head", spec.vocab_size, spec.hidden_size, "lora_{}.weight"),
    ):
        for letter, shape in (("A", (rank, inner)), ("B", (outer, rank))):
            key = f"base_model.model.{name}.{which.format(letter)}"
            tensors[key] = (0.1 * torch.randn(shape, generator=chance)).to(dtype)
        said["target_modules"].append(name.rpartition(".")[2])
    save_file(tensors, path)
    config.write_text(json.dumps(said))
    return directory


def asks() -> list[Ask]:
    prompts = [
        [5 + (11 * place + index) % 300 for index in range(count)] for place, count in enumerate((3, 17, 40, 70, 9))
    ]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 2}, {"temperature": 0.9, "seed": 3, "logprobs": 1}, {"temperature": 0.0},
        {"temperature": 0.7, "prompt_logprobs": 1, "n": 2}, {"temperature": 1.0, "seed": 4, "logprobs": 2},
    ]  # fmt: skip
    return [ask(prompt, **kind) for prompt, kind in zip(prompts, kinds, strict=True)]


def said(outputs: list[list[Output]]) -> list[Any]:
    """Tokens and log-probabilities, to the last bit."""
    return [[(one.token_ids, [msgspec.json.encode(each) for each in one.logprobs]) for one in some] for some in outputs]


def of_both(**options: Any) -> Engine:
    """Requests of two adapters and of none, as their prompts say."""
    return Engine(Policy(max_num_batched_tokens=64), **options)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """In float32, in bfloat16 and of an odd rank."""
    place = tmp_path_factory.mktemp("adapters")
    return [
        write_whole(MODEL, place / "a", seed=1, scale=0.2),
        write_whole(MODEL, place / "b", seed=2, scale=0.2, dtype=torch.bfloat16, rank=16),
        write_whole(MODEL, place / "c", seed=3, scale=0.2, rank=5),
    ]


@pytest.mark.parametrize(
    "formats",
    [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"quantization": "int8"}, {"enable_sequence_parallel": True}],
    ids=["float32", "bfloat16", "int8", "sequence-parallel"],
)
def test_streams_of_several_adapters_are_what_one_process_gives(formats: dict[str, Any], paths: list[Path]) -> None:
    alone = {name: value for name, value in formats.items() if name != "enable_sequence_parallel"}
    wanted = said(of_both(adapters=paths, **NATIVE, **alone).generate(asks()))
    bare = said(Engine(**NATIVE, **alone).generate(asks()))
    assert sum(one != two for one, two in zip(wanted, bare, strict=True)) >= 3, "adapters change nothing here"
    with GroupedEngine(Policy(max_num_batched_tokens=64), adapters=paths, **NATIVE, **formats) as engine:
        assert said(engine.generate(asks())) == wanted


@pytest.mark.parametrize("kind", ["qwen3", "phi3"])
def test_parts_that_are_not_equal(kind: str, tmp_path: Path) -> None:
    """Of three panels and of three heads; phi3 has queries, keys and values in one stored matrix, gate and up too."""
    changes = {"num_key_value_heads": 3, "num_attention_heads": 6, "hidden_size": 96, "intermediate_size": 160}
    save_checkpoint(tmp_path, kind, "native", changes | {"vocab_size": 500, "max_position_embeddings": 512})
    path = write_whole(tmp_path, tmp_path / "adapter", seed=4, scale=0.3)
    options = NATIVE | {"model": str(tmp_path), "dtype": "float32", "adapters": [path], "has_windows": kind == "phi3"}
    wanted = said(Engine(**options).generate(asks()))
    with GroupedEngine(**options) as engine:
        assert said(engine.generate(asks())) == wanted


def test_ranks_that_share_no_memory(paths: list[Path]) -> None:
    wanted = said(of_both(adapters=paths, **NATIVE, dtype="float32").generate(asks()))
    options = NATIVE | {"dtype": "float32", "adapters": paths, "grouped": over_tcp}
    with GroupedEngine(Policy(max_num_batched_tokens=64), **options) as engine:
        assert said(engine.generate(asks())) == wanted


def test_a_place_is_used_again_for_another_one(paths: list[Path]) -> None:
    """There is one: each is dropped for the next, and comes back."""
    options = NATIVE | {"dtype": "float32", "max_loras": 1, "max_cpu_loras": 1}

    def each(engine: Engine) -> list[Any]:
        adapters = [engine.load_adapter(path.name, path) for path in paths]
        one = asks()[2]
        return [said(engine.generate([msgspec.structs.replace(one, adapter=own)])) for own in [*adapters, *adapters]]

    wanted = each(Engine(**options))
    assert len({str(one) for one in wanted}) == 3
    with GroupedEngine(**options) as engine:
        assert each(engine) == wanted


def test_a_rank_that_finds_another_content_refuses_the_load_alone(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where hosts have different files under the same path."""
    with GroupedEngine(**NATIVE, dtype="float32", adapters=paths[:1]) as engine:
        wanted = said(engine.generate(asks()))
        bank = engine.runners["w0"].adapters
        assert bank is not None
        order = bank.hold_elsewhere
        monkeypatch.setattr(bank, "hold_elsewhere", lambda place, adapter: order(place, replace(adapter, digest="x")))
        with pytest.raises(LookupError, match=r"rank 1: .* has another content than when it was loaded first"):
            engine.load_adapter("b", paths[1])
        assert said(engine.generate(asks())) == wanted
