"""Checkpoints that cannot be served are refused with what is wrong and where; those that can are, however stored."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from engine.description.names import Part
from engine.description.reading import parse_config, read_config, tensors_of
from engine.loading.load import load_runner
from engine.weights.pages import drop_pages
from engine.weights.plain import DummyWeights
from engine.weights.source import Checkpoint, WeightSource, terminal_progress
from shared.config import Settings
from shared.errors import ModelError
from shared.text.model_source import resolve_model_dir
from tests.engine.checkpoints import make_runner, random_prompt, save_checkpoint
from tests.engine.driver import Driver

LAYER = "model.layers.1."


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tied")
    save_checkpoint(directory, "llama-tied")
    return directory


@pytest.fixture
def copy(tied: Path, tmp_path: Path) -> Path:
    """A checkpoint of its own for a test to spoil."""
    for file in tied.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def edit(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def load(directory: Path) -> dict[str, torch.Tensor]:
    config = read_config(directory)
    return take_all(Checkpoint(directory, config), list(tensors_of(config).parts()))


def take_all(source: WeightSource, parts: list[Part]) -> dict[str, torch.Tensor]:
    taken = {part.name: source.take(part).clone() for part in parts}
    source.release()
    return taken


def greedy(directory: Path, **settings: Any) -> list[int]:
    driver = Driver(make_runner(directory, **settings))
    sequence = driver.add(0, random_prompt(20, seed=3))
    driver.generate(8)
    return sequence.output


def test_sharded(tmp_path: Path) -> None:
    for name in ("one", "many"):
        (tmp_path / name).mkdir()
    save_checkpoint(tmp_path / "one", "qwen3")
    save_checkpoint(tmp_path / "many", "qwen3", max_shard_size="60KB")
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 2
    assert greedy(tmp_path / "many") == greedy(tmp_path / "one")


def test_tied_as_head_only(tied: Path, copy: Path) -> None:
    edit(copy, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    assert greedy(copy) == greedy(tied)


def test_tied_with_both(tied: Path, copy: Path) -> None:
    edit(copy, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert greedy(copy) == greedy(tied)


def test_tied_with_neither(copy: Path) -> None:
    edit(copy, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    with pytest.raises(ModelError, match=r"lacks model\.embed_tokens\.weight"):
        load(copy)


def test_missing_tensors(copy: Path) -> None:
    edit(copy, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith(LAYER)])
    with pytest.raises(ModelError, match=r"lacks model\.layers\.1\.input_layernorm\.weight.* and 4 more"):
        load(copy)


def test_extra_tensor(copy: Path) -> None:
    edit(copy, lambda tensors: tensors.update({LAYER + "self_attn.q_proj.bias": torch.zeros(48)}))
    with pytest.raises(ModelError, match=r"has model\.layers\.1\.self_attn\.q_proj\.bias, which LlamaForCausalLM"):
        load(copy)


def test_harmless_extra_tensor(tied: Path, copy: Path) -> None:
    edit(copy, lambda tensors: tensors.update({LAYER + "self_attn.rotary_emb.inv_freq": torch.zeros(6)}))
    assert load(copy).keys() == load(tied).keys()


def test_misshapen_tensor(copy: Path) -> None:
    edit(copy, lambda tensors: tensors.update({LAYER + "mlp.up_proj.weight": torch.zeros(71, 48)}))
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight has shape \[71, 48\].*\[72, 48\]"):
        load(copy)


def test_integer_tensor(copy: Path) -> None:
    edit(copy, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(48, dtype=torch.int8)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight has dtype I8"):
        load(copy)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: b"",
        lambda content: content[:5],
        lambda content: content[:200],
        lambda content: content[: len(content) - 100],
        lambda content: struct.pack("<Q", 1 << 60) + content[8:],
        lambda content: content[:8] + b"\xff" * 50 + content[58:],
    ],
    ids=["empty", "no-length", "half-header", "half-data", "huge-header", "no-json"],
)
def test_corrupt_file(copy: Path, spoil: Callable[[bytes], bytes]) -> None:
    path = copy / "model.safetensors"
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(ModelError, match=r"cannot read .*model\.safetensors: "):
        load(copy)


def test_no_weights(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        load(copy)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "cannot read"),
        ("[]", "has no weight_map"),
        ('{"weight_map": {"a": 1}}', "has no weight_map"),
        ('{"weight_map": {"a": "../a.safetensors"}}', "outside the checkpoint's directory"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "cannot read .*gone.safetensors"),
        ('{"weight_map": {"a": "part.safetensors"}}', "part.safetensors lacks a, which"),
    ],
)
def test_bad_index(copy: Path, index: str, message: str) -> None:
    (copy / "model.safetensors").rename(copy / "part.safetensors")
    (copy / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    with pytest.raises(ModelError, match=message):
        load(copy)


def test_dummy_weights_need_no_checkpoint(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    config = read_config(copy)
    parts = list(tensors_of(config).parts())
    first, other = (take_all(DummyWeights(config, seed=seed), parts) for seed in (1, 2))
    again = take_all(DummyWeights(config, seed=1), parts[::-1])
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert len({float(tensor.std()) for tensor in first.values() if tensor.dim() == 2}) > 20, "no two alike"
    assert len(greedy(copy, load_format="dummy")) == 8


class Bar:
    """Counts what it is told."""

    def __init__(self, total: int) -> None:
        self.total, self.seen, self.closed = total, 0, False

    def update(self) -> None:
        self.seen += 1

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("both", [False, True])
def test_progress_counts_tensors(copy: Path, both: bool) -> None:
    if both:
        edit(copy, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    bars: list[Bar] = []

    def progress(total: int) -> Bar:
        bars.append(Bar(total))
        return bars[0]

    load_runner(Settings.of(model=str(copy), num_blocks=8), progress=progress)
    (bar,) = bars
    assert bar.seen == bar.total == len(tensors_of(read_config(copy)).shapes())
    assert bar.closed


def test_pages_of_taken_tensors_are_given_back(tmp_path: Path) -> None:
    names = [f"t{index}" for index in range(8)]
    save_file({name: torch.ones(1 << 20) for name in names}, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        begin, most = resident(), 0
        for name in names:
            tensor = file.get_tensor(name)
            assert float(tensor.sum()) == 1 << 20
            most = max(most, resident() - begin)
            drop_pages(tensor)
            assert float(tensor[0]) == 1.0, "it can be read again"
    assert (4 << 20) - (1 << 16) <= most < 6 << 20, "one tensor at a time"


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


def test_no_bar_without_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    bar = terminal_progress(2)
    bar.update()
    bar.close()
    assert capfd.readouterr().err == ""


def test_a_bar_on_a_terminal() -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    program = "from engine.weights.source import terminal_progress as bar; bar(1).update()"
    subprocess.run([sys.executable, "-c", program], stderr=theirs, check=True)
    shown = os.read(ours, 4096)
    assert b"loading weights:" in shown and shown.endswith(b"\r"), "it leaves nothing behind"
    os.close(ours)
    os.close(theirs)


MINIMAL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 100,
    "vocab_size": 50,
}

LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["OPTForCausalLM"]}, "architecture 'OPTForCausalLM' is not supported; supported: Llama"),
        ({"architectures": None}, "architectures is missing"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": "50"}, "vocab_size must be a positive integer, got '50'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, got 0"),
        ({"num_attention_heads": 5}, "head_dim is missing and hidden_size .64. is no multiple"),
        ({"num_key_value_heads": 3}, "is no multiple of num_key_value_heads"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a positive number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "rope type 'spiral' is not supported"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope' needs short_factor"),
        ({"rope_scaling": LONG | {"long_factor": [1.0] * 7}}, "long_factor must have 8 numbers, got 7"),
        ({"rope_scaling": {"type": "linear"}}, "rope type 'linear' needs factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor must be a positive number, got 0"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "rope type 'llama3' needs low_freq_factor"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        ({"rope_theta": "x"}, "rope_theta must be a positive number"),
    ],
)
def test_bad_config(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_config(MINIMAL | change)


def test_unreadable_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(ModelError, match="is not a JSON object"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["X"]}), encoding="utf-8")
    with pytest.raises(ModelError, match=r"config\.json: architecture 'X'"):
        read_config(tmp_path)


def test_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model_dir(str(tmp_path)) == tmp_path
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="is a file"):
        resolve_model_dir(str(tmp_path / "file"))
    with pytest.raises(ModelError, match="does not exist"):
        resolve_model_dir(str(tmp_path / "gone"))

    def offline(*_: object, **__: object) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ModelError, match=r"'some/model' is not a directory and cannot be downloaded: no route"):
        resolve_model_dir("some/model")
