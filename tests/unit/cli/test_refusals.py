"""What cannot be served is refused before a process starts: one plain line, exit status 78."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from services.cli.main import main
from services.cli.supervision.supervisor import Supervisor
from tests.unit.cli.quantised import quantised_copy

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "models" / "pageant-stories"


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """`pageant serve` with ports and sockets of its own; no process may start."""
    environment = {
        "PAGEANT_RUNTIME_DIR": str(tmp_path / "run"),
        "PAGEANT_PORT": "0",
        "PAGEANT_HTTP_PORT": "-1",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(tmp_path / "hub"),
    }

    def refuse(self: Supervisor) -> None:
        raise AssertionError("a process was about to start")

    monkeypatch.setattr(Supervisor, "start", refuse)
    monkeypatch.chdir(ROOT)
    return lambda *words: CliRunner().invoke(main, ["serve", *words], env=environment)


def refused(done: Result, *expected: str) -> None:
    assert done.exit_code == 78, (done.stderr, done.exception)
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("pageant: "), done.stderr
    assert "Traceback" not in done.output and not done.stdout
    for text in expected:
        assert text in lines[0]


def damaged(directory: Path, damage: Callable[[Path], Any]) -> str:
    copy = Path(shutil.copytree(MODEL, directory / "model"))
    damage(copy)
    return str(copy)


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def only_gguf(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "model.Q4_K_M.gguf").write_bytes(b"GGUF")


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


WRONG_WORDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "wrong path": (("-m", "/nowhere/model"), ("'/nowhere/model' does not exist",)),
    "a directory misspelt": (("models/pageant-storie",), ("does not exist", "did you mean 'models/pageant-stories'?")),
    "misspelt as on the hub": (("-m", "model/pageant-storie"), ("is not a directory; did you mean 'models/pageant",)),
    "the hub without a network": (("-m", "someone/some-model"), ("the hub cannot be reached",)),
    "a GGUF file": (("-m", "some/model.gguf"), ("GGUF", "config.json, tokenizer.json and *.safetensors")),
    "a file": (("-m", str(MODEL / "config.json")), ("is a file; give the directory",)),
    "too long": (("-m", str(MODEL), "--max-model-len", "99999999"), ("max_model_len", "positions")),
    "too much KV cache": (("--kv-cache-memory", str(1 << 50)), ("kv_cache_memory", "GiB are free")),
    "too many blocks": (("--num-blocks", str(1 << 40)), ("num_blocks", "GiB are free")),
    "too little KV cache": (("--kv-cache-memory", "1000"), ("kv_cache_memory",)),
    "too little for the length": (("--num-blocks", "2", "--max-model-len", "1000"), ("2 blocks",)),
    "no such draft": (("--draft", "/nowhere/draft"), ("draft", "does not exist")),
    "a draft misspelt": (("--draft", "models/pageant-stories-drat"), ("did you mean 'models/pageant-stories-draft'?",)),
    "port": (("--port", "65536"), ("port must be in 0..65535",)),
    "HTTP port": (("--http-port", "70000"), ("http_port must be in -1..65535",)),
    "ports of a row": (("--port", "65535", "--gateways", "2"), ("65536",)),
    "one port twice": (("--port", "5999", "--http-port", "5999"), ("both 5999",)),
    "not our address": (("--host", "192.0.2.1", "--port", "5998"), ("192.0.2.1:5998",)),
    "no such host": (("--host", "no.such.host.invalid", "--port", "5998"), ("no.such.host.invalid:5998",)),
    "short key": (("--api-keys", "abc"), ("key",)),
    "no key file": (("--api-keys-file", "/nowhere/keys"), ("api_keys_file /nowhere/keys",)),
    "no certificate": (("--tls-cert-file", "/nowhere/c", "--tls-key-file", "/nowhere/k"), ("tls_cert_file",)),
    "runtime_dir": (("--runtime-dir", "/proc/nowhere"), ("/proc/nowhere",)),
    "runtime_dir is a file": (("--runtime-dir", str(ROOT / "README.md")), ("README.md",)),
    "long runtime_dir": (("--runtime-dir", "/tmp/" + "x" * 120), ("too long",)),
    "log_dir": (("--log-dir", str(ROOT / "README.md" / "logs")), ("--log-dir",)),
    "incident_dir": (("--incident-dir", str(ROOT / "README.md" / "incidents")), ("incident_dir",)),
    "record": (("--record", "/nowhere/file.rec"), ("record /nowhere/file.rec",)),
    "record_steps": (("--record-steps", "/nowhere/steps"), ("record_steps /nowhere/steps",)),
    "status_file": (("--status-file", "/nowhere/status"), ("status_file /nowhere/status",)),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_WORDS)
def test_what_is_wrong_is_said_in_one_line(case: str, serve: Callable[..., Result], tmp_path: Path) -> None:
    words, expected = WRONG_WORDS[case]
    refused(serve(*words), *expected)
    assert not (tmp_path / "run").exists(), "nothing was begun"


def scheme(**changes: Any) -> Callable[[Path], None]:
    """Change how all matrices of the checkpoint are said to be quantised."""

    def change(directory: Path) -> None:
        path = directory / "config.json"
        content = json.loads(path.read_text(encoding="utf-8"))
        content["quantization_config"]["config_groups"]["group_0"]["weights"] |= changes
        path.write_text(json.dumps(content), encoding="utf-8")

    return change


def header(old: bytes, new: bytes) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "model.safetensors"
        content = path.read_bytes()
        assert len(old) == len(new) and old in content
        path.write_bytes(content.replace(old, new))

    return change


WRONG_QUANTISED: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "2 bits": ("ct-w4a16", scheme(num_bits=2), "weights.num_bits is 2"),
    "3 bits": ("ct-w4a16", scheme(num_bits=3), "weights.num_bits is 3"),
    "groups": ("ct-w4a16", scheme(group_size=32), "weight_scale has shape [128, 2], expected [128, 4] (4"),
    "E5M2": ("ct-fp8-tensor", header(b'"F8_E4M3"', b'"F8_E5M2"'), "weight has dtype F8_E5M2, expected F8_E4M3"),
    "name": ("ct-w4a16", header(b"q_proj.weight_scale", b"q_proj.weight_scalf"), "q_proj.weight_scale is missing"),
    "cut off": ("ct-w4a16", lambda d: cut(d / "model.safetensors"), "is not whole"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_QUANTISED)
def test_a_quantised_checkpoint_is_refused(case: str, serve: Callable[..., Result], tmp_path: Path) -> None:
    fixture, damage, expected = WRONG_QUANTISED[case]
    model = quantised_copy(tmp_path / "model", fixture)
    damage(model)
    refused(serve("-m", str(model)), expected)


WRONG_FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "quantised": (
        lambda d: rewrite(d / "config.json", quantization_config={"quant_method": "x"}),
        "quantization_config",
    ),
    "GGUF": (only_gguf, "GGUF files, which are not served"),
    "no tokenizer": (lambda d: (d / "tokenizer.json").unlink(), "lacks tokenizer.json"),
    "unknown": (lambda d: rewrite(d / "config.json", architectures=["MambaForCausalLM"]), "MambaForCausalLM"),
    "config.json": (lambda d: (d / "config.json").write_text("{"), "config.json"),
    "cut off": (lambda d: cut(d / "model.safetensors"), "is not whole"),
    "LFS": (lambda d: (d / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"), "git lfs"),
    "shards": (
        lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001.safetensors"}}'),
        "model-00001.safetensors",
    ),
}


@pytest.mark.parametrize("case", WRONG_FILES)
def test_a_checkpoint_that_cannot_be_served_is_refused(case: str, serve: Callable[..., Result], tmp_path: Path) -> None:
    damage, expected = WRONG_FILES[case]
    refused(serve("-m", damaged(tmp_path, damage)), expected)


def test_a_port_that_is_taken(serve: Callable[..., Result]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        refused(serve("--port", str(taken.getsockname()[1])), "choose another --port")


def test_a_repository_that_the_hub_does_not_have(serve: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.cli.checks.models.ask_hub", lambda name: "absent")
    refused(serve("-m", "model/pageant-storie"), "neither a directory nor a repository of", "did you mean 'models/pag")


def test_two_models_are_one_too_many(serve: Callable[..., Result]) -> None:
    done = serve("here", "-m", "there")
    assert done.exit_code == 2 and "not both" in done.output


LINEAR = {
    "architectures": ["Qwen3_5ForCausalLM"], "vocab_size": 4096, "hidden_size": 64, "intermediate_size": 80,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 512, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16, "linear_value_head_dim": 32,
}  # fmt: skip
WRONG_STATES: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "heads": ({"linear_num_value_heads": 5}, (), "linear_num_value_heads (5) is no multiple"),
    "no attention": ({"layer_types": ["linear_attention"] * 4}, (), "layer_types without full_attention"),
    "no room": ({}, ("--kv-cache-memory", "200000"), "this model keeps a state of"),
    "a draft": ({}, ("--draft", ""), "has linear attention, whose states cannot take tokens back"),
}


@pytest.mark.parametrize("case", WRONG_STATES)
def test_what_is_wrong_with_linear_attention(case: str, serve: Callable[..., Result], tmp_path: Path) -> None:
    changes, words, expected = WRONG_STATES[case]
    model = damaged(tmp_path, lambda d: (d / "config.json").write_text(json.dumps(LINEAR | changes)))
    words = ("-m", str(MODEL), "--draft", model) if words[:1] == ("--draft",) else ("-m", model, *words)
    refused(serve(*words, "--load-format", "dummy"), expected)
