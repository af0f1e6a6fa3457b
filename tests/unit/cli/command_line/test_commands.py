"""The commands' options, the terminal client and the doctor's findings."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner

from services.cli import doctor
from services.cli.addresses import with_port
from services.cli.checks import Finding, examine
from services.cli.checks.models import check_model
from services.cli.checks.settings import check_runtime, why_taken
from services.cli.command_line.options import sampling_options, settings_options, take_sampling, take_settings
from services.cli.display.client import Figures, printable
from services.cli.main import main
from services.cli.serve import roles
from services.cli.supervision.supervisor import Replicas
from shared.config import EngineSettings, Settings, places
from tests.unit.cli.quantised import quantised_copy

seen: list[Any] = []


@click.command()
@settings_options
@sampling_options
def probe(**arguments: Any) -> None:
    """Records what the options became."""
    settings = take_settings(arguments)
    seen.append((settings, take_sampling(arguments), arguments))


def run(*arguments: str, **environment: str) -> Any:
    seen.clear()
    result = CliRunner().invoke(probe, arguments, env=environment)
    return seen[0] if seen else result


@pytest.mark.parametrize("field", list(places()))
def test_every_setting_has_an_option(field: str) -> None:
    help_text = CliRunner().invoke(main, ["serve", "--help"]).output
    assert f"--{field.replace('_', '-')} " in help_text


def test_options_win_over_the_environment_which_wins_over_the_defaults() -> None:
    settings, sampling, rest = run(
        "-m", "here", "--max-num-seqs", "3", "--no-enable-prefix-caching", "--block-size", "32",
        PAGEANT_MAX_NUM_SEQS="9", PAGEANT_PORT="4",
    )  # fmt: skip
    assert (settings.engine.model, settings.scheduling.max_num_seqs) == ("here", 3)
    assert (settings.gateway.port, settings.memory.block_size) == (4, 32)
    assert not settings.memory.enable_prefix_caching and settings.scheduling.max_n == 64
    assert (sampling, rest) == ({}, {})


def test_only_given_sampling_parameters_are_sent() -> None:
    _, sampling, _ = run("--temperature", "0", "--max-tokens", "5", "--stop", "a", "--stop", "b")
    assert sampling == {"temperature": 0.0, "max_tokens": 5, "stop": ("a", "b")}


def test_a_bad_setting_is_named() -> None:
    assert "max_num_seqs must be at least 1" in run("--max-num-seqs", "0").output
    assert "--block-size" in run("--block-size", "7").output


def test_a_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "pageant.toml"
    file.write_text("max_num_seqs = 7\n")
    assert run("--config", str(file))[0].scheduling.max_num_seqs == 7


def test_replicas_and_ports() -> None:
    names = [role.name for role in roles(Settings.of(draft="off"), Replicas(workers=2, drafts=2))]
    assert names == ["worker-0", "worker-1", "scheduler-0", "tokenizer-0", "detokenizer-0", "gateway-0"]
    names = [role.name for role in roles(Settings.of(draft="ngram"), Replicas(drafts=2))]
    assert names == ["worker-0", "draft-0", "draft-1", "scheduler-0", "tokenizer-0", "detokenizer-0", "gateway-0"]
    assert with_port(Settings.of(port=9)).gateway.port == 9 and with_port(Settings.of(port=0)).gateway.port > 0


def test_the_command_imports_neither_torch_nor_grpc_to_begin() -> None:
    code = "import sys, services.cli.main as m; sys.exit(bool({'torch', 'grpc', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_a_server_generate_says_how_to_start_one() -> None:
    result = CliRunner().invoke(main, ["generate", "x", "--address", "127.0.0.1:1"])
    assert result.exit_code == 1 and "pageant serve" in result.output


def test_figures() -> None:
    figures = Figures()
    usage = SimpleNamespace(
        prompt_tokens=3, cached_tokens=2, completion_tokens=5, num_draft_tokens=0, num_accepted_tokens=0
    )
    figures.add(SimpleNamespace(usage=usage, finish_reason=0, HasField=lambda name: False))
    figures.add(SimpleNamespace(usage=usage, finish_reason=0, HasField=lambda name: name == "usage"))
    assert (figures.prompt_tokens, figures.cached_tokens, figures.completion_tokens) == (3, 2, 5)
    assert figures.ttft_ms > 0 and figures.tpot_ms >= 0 and "completion tokens: 5" in str(figures)
    assert "draft" not in str(figures), "nothing was proposed"
    usage.num_draft_tokens, usage.num_accepted_tokens = 8, 6
    figures.add(SimpleNamespace(usage=usage, finish_reason=0, HasField=lambda name: name == "usage"))
    assert "draft tokens accepted: 6 of 8" in str(figures)


def test_a_terminal_gets_no_control_characters() -> None:
    assert printable("a\x1b[31mb\n\tc\x07é") == "a[31mb\n\tcé"


def verdicts(findings: Any) -> list[str]:
    return [finding.verdict for finding in findings]


def found(settings: Settings, subject: str) -> list[Finding]:
    return [finding for finding in examine(settings) if finding.subject == subject]


def test_doctor_on_models(tmp_path: Path) -> None:
    assert verdicts(found(Settings.of(model=str(tmp_path / "none")), "model")) == ["wrong"]
    (finding,) = found(Settings.of(model=str(tmp_path)), "model")
    assert finding.text.endswith("lacks config.json, tokenizer.json, *.safetensors")
    finding, facts = check_model(Settings().engine.model, "model", EngineSettings())
    assert finding.verdict == "ok" and "LlamaForCausalLM, 9.5 MB of weights" in finding.text
    assert facts is not None and facts.num_elements > 1_000_000
    assert verdicts(found(Settings(), "draft")) == []
    assert verdicts(found(Settings.of(draft="ngram"), "draft")) == ["ok"]
    assert verdicts(found(Settings.of(draft=str(tmp_path / "none")), "draft")) == ["wrong"]


def test_doctor_counts_a_draft_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block has keys and values of one layer more than the model's five."""
    settings = Settings.of(num_blocks=1000)
    head = settings.replace(draft=f"eagle:{Path(settings.engine.model).parent / 'pageant-stories-eagle'}")
    (finding,) = found(head, "draft")
    assert finding.verdict == "ok" and "EAGLE-3 head of 1.3 M weights" in finding.text
    block = 16 * 2 * 4 * 32 * 2  # tokens, keys and values, heads, features, bytes
    free = 1000 * 6 * block + 2 * 4_737_792 + 1_000_000
    monkeypatch.setattr("services.cli.checks.models.available_memory", lambda: free)
    assert "wrong" not in verdicts(found(settings, "memory"))
    assert verdicts(found(head, "memory"))[0] == "wrong"


@pytest.mark.parametrize(("standing", "verdict"), [("there", "note"), ("absent", "wrong"), ("unreachable", "wrong")])
def test_doctor_asks_the_hub(monkeypatch: pytest.MonkeyPatch, standing: str, verdict: str) -> None:
    monkeypatch.setattr("services.cli.checks.models.find_snapshot", lambda name: None)
    monkeypatch.setattr("services.cli.checks.models.ask_hub", lambda name: standing)
    assert verdicts(found(Settings.of(model="someone/some-model"), "model")) == [verdict]


def test_doctor_on_ports_and_directories(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert why_taken("127.0.0.1", port) is not None
    assert why_taken("127.0.0.1", port) is None
    tmp_path.chmod(0o755)
    assert check_runtime(Settings.of(runtime_dir=str(tmp_path))).verdict == "note"
    assert check_runtime(Settings.of(runtime_dir="/" + "x" * 120)).verdict == "wrong"
    assert doctor.check_python().verdict == "ok"


def test_doctor_on_the_memory_plan() -> None:
    parts = {"executor": "native 12", "numeric_class": "avx2", "weights": "ab" * 16}
    plan = {
        "system_fingerprint": "fp_1", "fingerprint": parts,
        "torch": "2", "device": "cpu", "device_name": "2 cores", "formats": "float32", "bytes": 1 << 30,
        "kernels": "native avx2", "num_threads": 2, "no_native": "",
        "num_blocks": 8, "block_size": 16, "num_tokens": 128, "max_model_len": 64,
        "max_num_seqs": 9, "num_snapshots": 7, "state_bytes": 0,
    }  # fmt: skip
    device, kernels, fingerprint, memory = doctor.check_plan(plan)
    assert device.verdict == kernels.verdict == fingerprint.verdict == memory.verdict == "ok"
    assert fingerprint.text == "fp_1: native 12, avx2; weights abababababab"
    _, _, unknown, _ = doctor.check_plan(plan | {"system_fingerprint": "", "fingerprint": parts | {"weights": ""}})
    assert "known once the weights were loaded" in unknown.text
    assert kernels.text == "native avx2, 2 threads; float32"
    assert "8 blocks of 16 tokens hold 128 tokens, 2.0 requests of max_model_len=64" in memory.text
    assert "states" not in memory.text
    *_, memory = doctor.check_plan(plan | {"state_bytes": 1 << 29})
    assert "0.50 GiB of it are states of linear attention: of 9 sequences at once, and 7 snapshots" in memory.text
    assert verdicts(doctor.check_plan(plan | {"no_native": "no compiler"})) == ["ok", "note", "ok", "ok"]
    assert verdicts(doctor.check_plan({"error": "no such model"})) == ["wrong"]


def test_doctor_ends_with_1_where_something_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ask_plan", lambda settings: {"error": "broken\nmodel"})
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 1 and "broken model" in result.output
    result = CliRunner().invoke(main, ["doctor", "-m", "/nowhere"])
    assert result.exit_code == 1 and "broken" not in result.output, "the model's files say enough"


def test_doctor_on_a_quantised_checkpoint(tmp_path: Path) -> None:
    model = quantised_copy(tmp_path / "model")
    finding, facts = check_model(str(model), "model", EngineSettings(quantization="int8", device="cpu"))
    assert finding.verdict == "ok" and facts is not None
    assert "compressed-tensors: 6 of 9 matrices in 4 bits, groups of 64, symmetric (0.1 MB)" in finding.text
    assert (
        "not quantised: lm_head, model.embed_tokens, model.layers.*.mlp.down_proj; dequantised at load" in finding.text
    )
    assert facts.num_elements == 139_648, "of the weights, not of what they are packed in"
    finding, facts = check_model(str(model), "model", EngineSettings(device="cpu"))
    assert finding.text.endswith("; 6 stay codes (0.1 MB), which native kernels multiply (W4A8, W8A8)")
    assert facts is not None and (facts.kept_elements, facts.kept_bytes) == (98_304, 98_304 * 17 // 32)
    for decoding in ({"dtype": "float32"}, {"quantization": "none"}):
        finding, facts = check_model(str(model), "model", Settings.of(device="cpu", **decoding).engine)
        assert finding.text.endswith("; 6 stay codes (0.1 MB), which native kernels decode while they multiply")
        assert facts is not None and facts.kept_bytes == 98_304 * 18 // 32, "scales may need float32"
    for other in ({"kernels": "torch"}, {"quantization": "int8"}):
        _, facts = check_model(str(model), "model", Settings.of(device="cpu", **other).engine)
        assert facts is not None and facts.kept_bytes == 0
    fp8 = str(quantised_copy(tmp_path / "fp8", "ct-fp8-dynamic"))
    finding, _ = check_model(fp8, "model", EngineSettings(device="cpu"))
    assert "stay codes (0.1 MB), which native kernels decode while they multiply; activations stay" in finding.text
    finding, _ = check_model(fp8, "model", EngineSettings(kernels="torch"))
    assert finding.text.endswith("dequantised at load; activations stay in 16 or 32 bits")


def test_doctor_on_a_quantised_checkpoint_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes stay where there is Triton, and the setting asks for no others."""
    narrow, octets = (str(quantised_copy(tmp_path / name, name)) for name in ("ct-w4a16", "ct-fp8-dynamic"))
    asked = [("auto", 2), ("none", 2), ("int4", 1), ("int8", 0), ("fp8", 0)]
    for installed in (True, False):
        monkeypatch.setattr(
            "services.cli.checks.models.find_spec", lambda name, there=installed: object() if there else None
        )
        for quantization, count in asked:
            engine = Settings.of(device="cuda", quantization=quantization).engine
            found = [check_model(model, "model", engine)[0].text for model in (narrow, octets)]
            said = ["stay codes (0.1 MB), which Triton's kernels decode while they multiply" in text for text in found]
            assert said == [installed and count > 0, installed and count > 1]
