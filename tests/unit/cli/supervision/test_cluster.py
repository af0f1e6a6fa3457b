"""`pageant serve` with workers that Ray places: what is refused, what is started, what is said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from click.testing import CliRunner

from services.cli.checks.settings import examine, examine_model
from services.cli.main import main
from services.cli.serve import JoinProgress
from services.cli.supervision import cluster
from services.cli.supervision.cluster import on_cluster
from services.cli.supervision.processes import Starter
from services.cli.supervision.supervisor import ChildProcess, Role, Supervisor
from shared.actor.status import write_waits
from shared.config import Settings, load_configuration
from shared.errors import ConfigError, FatalError
from shared.ranks.ray import NEEDS_RAY, has_ray

RAY = Settings.of(executor="ray")


def answering(monkeypatch: pytest.MonkeyPatch, status: int, out: bytes, error: bytes = b"") -> None:
    """Ray is installed, and the process that asks it ends so."""
    monkeypatch.setattr(cluster, "has_ray", lambda: True)
    done = subprocess.CompletedProcess([], status, out, error)
    monkeypatch.setattr("services.cli.supervision.cluster.subprocess.run", lambda *_, **__: done)


def test_without_ray_one_line_and_status_78(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "has_ray", lambda: False)
    done = CliRunner().invoke(main, ["serve", "--executor", "ray", "--runtime-dir", str(tmp_path / "run")])
    assert (done.exit_code, done.stderr) == (78, f"pageant: {NEEDS_RAY}\n")
    assert not (tmp_path / "run").exists()


def test_a_cluster_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, 70, b"", b"[gcs] noise\nno Ray cluster answers at 10.0.0.1:1 (ray_address): refused\n")
    done = CliRunner().invoke(main, ["serve", "--executor", "ray"])
    assert (done.exit_code, done.stderr) == (
        1, "pageant: no Ray cluster answers at 10.0.0.1:1 (ray_address): refused\n"
    )  # fmt: skip


def test_workers_of_other_nodes_find_the_scheduler_at_this_nodes_address(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, 0, b"10.0.0.5\n")
    found = on_cluster(RAY).deployment
    assert (found.transport, found.scheduler_host) == ("tcp", "10.0.0.5")
    assert on_cluster(RAY.replace(scheduler_host="head.example")).deployment.scheduler_host == "head.example"
    local = Settings()
    assert on_cluster(local) is local
    answering(monkeypatch, -6, b"")
    with pytest.raises(FatalError, match="status -6"):
        on_cluster(RAY)


def test_a_directory_named_ray_is_not_the_package(tmp_path: Path) -> None:
    (tmp_path / "ray").mkdir()
    script = "from shared.ranks.ray import has_ray; print(has_ray())"
    root = Path(__file__).resolve().parents[4]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(root)!r}]; {script}"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == f"{has_ray()}\n"


def test_one_host_is_needed_for_several_models_and_for_commands_with_a_private_deployment(tmp_path: Path) -> None:
    file = tmp_path / "pageant.toml"
    file.write_text('executor = "ray"\n[models.a]\nmodel = "models/a"\n[models.b]\nmodel = "models/b"\n')
    with pytest.raises(ConfigError, match="several models need one host, but executor is 'ray'"):
        load_configuration(file=file, environ={})
    done = CliRunner().invoke(main, ["quickstart", "--executor", "ray"])
    assert done.exit_code == 78
    assert done.stderr.startswith("pageant: executor is 'ray'") and done.stderr.count("\n") == 1


def test_this_hosts_memory_does_not_matter_to_workers_elsewhere() -> None:
    huge = RAY.replace(
        kv_cache_memory=1 << 60, model=str(Path(__file__).resolve().parents[4] / "models/pageant-stories")
    )
    assert {one.verdict for one in examine_model(huge)} == {"ok"}
    assert "wrong" in {one.verdict for one in examine_model(huge.replace(executor="local"))}


def test_doctor_says_whether_ray_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, verdict in ((True, "ok"), (False, "wrong")):
        monkeypatch.setattr("services.cli.checks.settings.has_ray", lambda found=found: found)
        assert [one.verdict for one in examine(RAY) if one.subject == "ray"] == [verdict]
        assert not [one for one in examine(Settings()) if one.subject == "ray"]


def test_workers_alone_are_started_by_way_of_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def start(command: list[str], *_: Any) -> Any:
        started.append(command[-1])
        return Mock(pid=1)

    monkeypatch.setattr("services.cli.supervision.processes.start", start)
    for settings in (RAY, Settings()):
        for service in ("worker", "scheduler"):
            Starter(settings, tmp_path)(Role(service))
    assert started == ["services.worker.ray", "services.scheduler", "services.worker", "services.scheduler"]


def test_what_a_process_waits_for_is_said_once_and_again_when_it_changes() -> None:
    said: list[str] = []
    words, now = {"worker-1": ""}, [0.0]
    supervisor = Supervisor([Role("worker", 0), Role("worker", 1)], lambda _: _never(), report=said.append)
    starter: Any = SimpleNamespace(waits_for=lambda child: words.get(child.role.name, ""))
    progress = JoinProgress(supervisor, starter, said.append, lambda: now[0])
    for one in ("", "no CPU", "no CPU", "no GPU", "", "no GPU"):
        words["worker-1"] = one
        progress.poll()
        progress.poll()  # too soon to look again
        now[0] += 10
    line = "worker-1 waits for a place: no"
    assert said == [f"{line} CPU", f"{line} GPU", f"{line} GPU"]


def _never() -> Any:
    raise AssertionError


def test_a_process_says_what_it_waits_for_beside_its_status_file(tmp_path: Path) -> None:
    starter = Starter(Settings.of(runtime_dir=str(tmp_path)), tmp_path)
    child = ChildProcess(Role("worker"))
    assert starter.waits_for(child) == ""
    with subprocess.Popen(["sleep", "60"]) as process:
        child.process = process
        file = tmp_path / "status"
        starter._status_files[process] = file
        own = Settings.of(status_file=str(file)).deployment
        assert starter.waits_for(child) == ""
        write_waits(own, "it needs 1 GPU")
        assert starter.waits_for(child) == "it needs 1 GPU"
        write_waits(own, "")
        assert starter.waits_for(child) == ""
        write_waits(own, "it needs 1 GPU")
        process.kill()
        process.wait()
        assert starter.waits_for(child) == "", "it does not wait any more"
