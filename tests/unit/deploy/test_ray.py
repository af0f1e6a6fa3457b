"""deploy/ray: a RayJob and a job's variables, by the schemas and by what services read."""

from __future__ import annotations

import copy
import tomllib
from pathlib import Path
from typing import Any

import pytest

from shared.config import load_settings, places
from shared.ranks.ray import has_ray
from shared.transport.keys import FILE
from tests.unit.deploy import schemas
from tests.unit.deploy.rendering import ROOT, Manifest, read

DIRECTORY = ROOT / "ray"
KNOWN = {f"PAGEANT_{name.upper()}" for name in places()}


@pytest.fixture
def job() -> Manifest:
    (manifest,) = read((DIRECTORY / "rayjob.yaml").read_text(encoding="utf-8"))
    return dict(manifest)


def groups(job: Manifest) -> tuple[Manifest, Manifest]:
    """The head's, and the workers'."""
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    return cluster["headGroupSpec"], workers


def variables(pod: Manifest) -> dict[str, str]:
    (container,) = pod["spec"]["containers"]
    return {one["name"]: one["value"] for one in container.get("env", ())}


@pytest.mark.skipif(not schemas.is_installed(), reason=f"needs the package {schemas.PACKAGE}")
@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_the_schemas_have_no_objection_but_to_misspelt_fields(job: Manifest, version: str) -> None:
    assert schemas.objections(job, version) == []
    for place in (
        ("spec",),
        ("spec", "rayClusterSpec"),
        ("spec", "rayClusterSpec", "headGroupSpec", "template", "spec"),
    ):
        wrong: Any = copy.deepcopy(job)
        inner = wrong
        for step in place:
            inner = inner[step]
        inner["comand"] = "x"
        assert any("comand" in why for why in schemas.objections(wrong, version)), place


def test_the_head_serves_and_all_nodes_have_keys_model_and_cpus(job: Manifest) -> None:
    head, workers = groups(job)
    own = variables(head["template"])
    assert own.keys() <= KNOWN and not variables(workers["template"]), "ranks get the settings of the head"
    settings = load_settings(environ=own)
    assert settings.engine.executor == "ray"
    assert int(workers["rayStartParams"]["num-cpus"]) == settings.engine.num_threads
    assert head["rayStartParams"]["num-cpus"] == "0", "no rank takes the place of the services"
    wanted = int(job["spec"]["entrypoint"].rpartition(" ")[2]) * settings.engine.tensor_parallel_size
    assert workers["replicas"] == wanted, "each rank has a node of its own"
    for group in (head, workers):
        spec = group["template"]["spec"]
        (container,) = spec["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert mounts[f"{settings.deployment.runtime_dir}/{FILE}"] == "keys"
        assert any(settings.engine.model.startswith(path) for path in mounts)
        assert set(mounts.values()) == {volume["name"] for volume in spec["volumes"]}
        assert spec["enableServiceLinks"] is False
        assert ("api-keys" in mounts.values()) == (group is head), "API keys are the gateways' alone"
    ports = {port["name"]: port["containerPort"] for port in head["template"]["spec"]["containers"][0]["ports"]}
    assert (ports["grpc"], ports["http"]) == (settings.gateway.port, settings.gateway.http_port)


def test_serve_has_a_runtime_directory_that_is_its_users(job: Manifest) -> None:
    """An empty volume belongs to root, and is refused as another user's directory: the image has one."""
    head, _ = groups(job)
    spec = head["template"]["spec"]
    (container,) = spec["containers"]
    runtime_dir = load_settings(environ=variables(head["template"])).deployment.runtime_dir
    assert not [mount for mount in container["volumeMounts"] if mount["mountPath"].rstrip("/") == runtime_dir]
    assert "readOnlyRootFilesystem" not in container["securityContext"], "it is written"
    image = (ROOT.parent / "Dockerfile").read_text(encoding="utf-8")
    assert f"install -d -o pageant -g pageant -m 0700 {runtime_dir} " in image
    assert f"useradd --uid {spec['securityContext']['runAsUser']} " in image


def test_the_jobs_variables_are_settings() -> None:
    (content,) = read((DIRECTORY / "runtime-env.yaml").read_text(encoding="utf-8"))
    assert content.keys() == {"env_vars"} and content["env_vars"].keys() <= KNOWN
    assert load_settings(environ=content["env_vars"]).engine.executor == "ray"


@pytest.mark.skipif(not has_ray(), reason="needs the package ray (pip install 'pageant[ray]')")
def test_ray_takes_the_jobs_variables() -> None:
    from ray.runtime_env import RuntimeEnv

    (content,) = read((DIRECTORY / "runtime-env.yaml").read_text(encoding="utf-8"))
    assert RuntimeEnv(**content).env_vars() == content["env_vars"]


def test_the_image_the_job_and_the_package_have_one_version_of_ray(job: Manifest) -> None:
    version = job["spec"]["rayClusterSpec"]["rayVersion"]
    assert f"=={version}" in (DIRECTORY / "Dockerfile").read_text(encoding="utf-8")
    project = tomllib.loads(Path(ROOT.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (wanted,) = project["optional-dependencies"]["ray"]
    assert version.startswith(wanted.removeprefix("ray>="))
