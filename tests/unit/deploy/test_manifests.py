"""deploy/ for Kubernetes: valid by the official schemas, consistent in itself, and with what services read."""

from __future__ import annotations

import base64
import itertools
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.cli.supervision.processes import PLACES
from services.gateway.access.auth import make_access
from services.store.main import PENDING_SHARE
from shared.config import Settings, load_settings
from shared.transport.keys import load_keys
from tests.unit.deploy import schemas
from tests.unit.deploy.rendering import KUSTOMIZE, ROOT, Manifest, build, identity, pod_templates, read, render

VERSIONS = ("1.29", "1.37")  # of Kubernetes
CASES = (("gpu", VERSIONS[0]), ("rank-groups", VERSIONS[1]), ("example", VERSIONS[1]))
COMPONENTS = ("autoscaling", "files", "gpu", "monitoring", "prefill", "store-disk", "rank-groups")  # the order matters
ABOUT_WORKERS = ("autoscaling", "gpu", "prefill", "rank-groups")
EXCLUSIVE = {"gpu", "rank-groups"}  # ranks compute on CPUs
# Settings of features that are merged beside this one: other versions ignore them.
LATER = {
    f"PAGEANT_{name}"
    for name in ("TENSOR_PARALLEL_SIZE", "STORE_DISK", "STORE_DISK_SIZE", "WORKER_ROLE", "SHARE_BLOCKS")
}
RESTRICTED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
PROCESS_BYTES = 1 << 30  # of a store beside the blocks: its keys, what is on its way


def everything(directory: Path, components: tuple[str, ...] = COMPONENTS) -> Path:
    """A kustomization with these components; kustomize wants paths that are relative."""
    base = Path(*[".."] * (len(directory.resolve().parts) - 1), *ROOT.parts[1:])
    plan = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "elsewhere",
        "resources": [str(base / "base")],
        "components": [str(base / "components" / name) for name in components],
        "images": [{"name": "pageant-worker-gpu", "newName": "registry.example/gpu", "newTag": "1"}],
    }
    (directory / "kustomization.yaml").write_text(yaml.safe_dump(plan), encoding="utf-8")
    return directory


@pytest.fixture(params=["base", "example", "gpu", "rank-groups"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The last two with all other components, too."""
    if request.param not in EXCLUSIVE:
        return ROOT / str(request.param)
    return everything(tmp_path, tuple(name for name in COMPONENTS if name not in EXCLUSIVE - {request.param}))


def by_name(manifests: list[Manifest]) -> dict[tuple[str, str], Manifest]:
    found = {identity(manifest): manifest for manifest in manifests}
    assert len(found) == len(manifests), "no name twice"
    return found


@pytest.mark.skipif(KUSTOMIZE is None, reason="needs kustomize (PAGEANT_TEST_KUSTOMIZE)")
def test_kustomize_makes_the_same(directory: Path) -> None:
    assert by_name(render(directory)) == by_name(build(directory))


@pytest.mark.skipif(not schemas.is_installed(), reason=f"needs the package {schemas.PACKAGE}")
@pytest.mark.parametrize(("directory", "version"), CASES, indirect=["directory"])
def test_the_schemas_have_no_objection(directory: Path, version: str) -> None:
    found = {identity(manifest): schemas.objections(manifest, version) for manifest in render(directory)}
    assert {name: why for name, why in found.items() if why} == {}


@pytest.mark.skipif(not schemas.is_installed(), reason=f"needs the package {schemas.PACKAGE}")
@pytest.mark.parametrize(
    ("kind", "name", "path"),
    [
        ("Deployment", "pageant-gateway", "spec.template.spec.containers.0.livenessProbe.exec"),
        ("LeaderWorkerSet", "pageant-worker", "spec.leaderWorkerTemplate.workerTemplate.spec.containers.0.resources"),
        ("ScaledObject", "pageant-worker", "spec.advanced.horizontalPodAutoscalerConfig.behavior.scaleUp"),
        ("PodMonitor", "pageant", "spec.podMetricsEndpoints.0"),
        ("NetworkPolicy", "pageant-bus", "spec.ingress.0"),
    ],
)
def test_a_misspelt_field_is_found(tmp_path: Path, kind: str, name: str, path: str) -> None:
    manifest = by_name(render(everything(tmp_path)))[kind, name]
    place: Any = manifest
    for step in path.split("."):
        place = place[int(step)] if isinstance(place, list) else place[step]
    place["comand"] = ["sh"]
    assert any("comand" in why for why in schemas.objections(manifest, VERSIONS[-1]))


@pytest.mark.skipif(not schemas.CRDS, reason="needs the definitions of custom resources (PAGEANT_TEST_CRDS)")
def test_there_is_a_definition_of_each_custom_kind() -> None:
    assert list(schemas.kinds_without_definition()) == []


def selected(manifests: list[Manifest], labels: dict[str, str]) -> list[Manifest]:
    """The templates of the pods that have these labels."""
    return [pod for _, pod in pod_templates(manifests) if labels.items() <= pod["metadata"]["labels"].items()]


def ports_of(template: Manifest) -> dict[str, int]:
    (container,) = template["spec"]["containers"]
    return {port["name"]: port["containerPort"] for port in container["ports"]}


def test_all_services_are_there_and_all_selectors_meet_pods(directory: Path) -> None:
    manifests = render(directory)
    components = {pod["metadata"]["labels"]["app.kubernetes.io/component"] for _, pod in pod_templates(manifests)}
    assert components - {"prefill"} == set(PLACES)
    for manifest, template in pod_templates(manifests):
        if selector := manifest["spec"].get("selector"):
            assert selected(manifests, selector["matchLabels"])[0] is template
    for manifest in manifests:
        spec = manifest.get("spec", {})
        match manifest["kind"]:
            case "Service":
                assert {port["targetPort"] for port in spec["ports"]} <= port_names(manifests, spec["selector"])
            case "PodDisruptionBudget":
                assert selected(manifests, spec["selector"]["matchLabels"])
            case "PodMonitor":
                for endpoint in spec["podMetricsEndpoints"]:
                    for pod in selected(manifests, spec["selector"]["matchLabels"]):
                        assert endpoint["port"] in ports_of(pod)
            case "NetworkPolicy":
                named = {port["port"] for rule in spec["ingress"] for port in rule.get("ports", ())}
                assert named <= port_names(manifests, spec["podSelector"]["matchLabels"])


def port_names(manifests: list[Manifest], labels: dict[str, str]) -> set[Any]:
    """Names of ports that all the pods with these labels have, and the bus."""
    pods = selected(manifests, labels)
    assert pods
    return set.intersection(*(set(ports_of(pod)) for pod in pods)) | {
        load_settings(environ={}).deployment.scheduler_port
    }


def test_budgets_never_overlap(directory: Path) -> None:
    """A pod that two of them concern could not be evicted at all."""
    budgets = [
        one["spec"]["selector"]["matchLabels"] for one in render(directory) if one["kind"] == "PodDisruptionBudget"
    ]
    assert len({tuple(sorted(labels.items())) for labels in budgets}) == len(budgets) >= len(PLACES) - 1


def environment(manifests: list[Manifest], template: Manifest) -> dict[str, str]:
    """The variables of a pod's container."""
    (container,) = template["spec"]["containers"]
    found: dict[str, str] = {}
    for source in container["envFrom"]:
        found |= by_name(manifests)["ConfigMap", source["configMapRef"]["name"]]["data"]
    return found | {variable["name"]: variable["value"] for variable in container.get("env", ())}


def test_services_take_their_settings_and_find_each_other(directory: Path) -> None:
    manifests = render(directory)
    for manifest, template in pod_templates(manifests):
        variables = environment(manifests, template)
        settings: Settings = load_settings(environ=variables)
        known = {f"PAGEANT_{name.upper()}" for name in settings.flat()}
        assert variables.keys() <= known | LATER
        deployment = settings.deployment
        service = by_name(manifests)["Service", deployment.scheduler_host]
        assert [port["port"] for port in service["spec"]["ports"]] == [deployment.scheduler_port]
        assert ports_of(template)["metrics"] == settings.observation.metrics_port
        ports = ports_of(template)
        if "http" in ports:
            assert (ports["http"], ports["grpc"]) == (settings.gateway.http_port, settings.gateway.port)
        spec, (container,) = template["spec"], template["spec"]["containers"]
        before = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
        assert spec["terminationGracePeriodSeconds"] > deployment.drain_timeout + int(before[1])
        mounted = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert len(set(mounted)) == len(mounted)
        assert f"{deployment.runtime_dir}/curve.json" in mounted
        for path in (settings.access.api_keys_file, settings.gateway.files_dir, settings.gateway.response_dir):
            assert not path or any(path.startswith(mount) for mount in mounted), path
        claimed = {claim["metadata"]["name"] for claim in manifest["spec"].get("volumeClaimTemplates", ())}
        volumes = {volume["name"] for volume in spec["volumes"]} | claimed
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_pods_have_no_rights_and_no_variables_of_services(directory: Path) -> None:
    for _, template in pod_templates(render(directory)):
        spec = template["spec"]
        assert spec["enableServiceLinks"] is False, (
            "a service pageant-... would make variables that are read as settings"
        )
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert all(container["securityContext"] == RESTRICTED for container in spec["containers"])
        assert spec["shareProcessNamespace"] is True, "as process 1 a rank would ignore SIGTERM"
        (container,) = spec["containers"]
        assert container["resources"]["limits"]["memory"] and container["resources"]["requests"]["cpu"]
        assert {"startupProbe", "readinessProbe", "livenessProbe"} <= container.keys()
        assert "httpGet" not in container["livenessProbe"], "a gateway is not ended for what it lacks"


def test_a_store_has_room_for_its_blocks_and_those_that_wait(directory: Path) -> None:
    manifests = render(directory)
    (template,) = selected(manifests, {"app.kubernetes.io/component": "store"})
    memory = load_settings(environ=environment(manifests, template)).memory
    num_behind = bool(memory.store_disk) + bool(memory.store_backend)
    needed = memory.store_memory + num_behind * (memory.store_memory // PENDING_SHARE) + PROCESS_BYTES
    resources = template["spec"]["containers"][0]["resources"]
    for given in (resources["requests"]["memory"], resources["limits"]["memory"]):
        assert int(given.removesuffix("Gi")) << 30 >= needed, given


@pytest.mark.parametrize("extent", range(len(ABOUT_WORKERS)))
def test_every_choice_of_components_fits_together(tmp_path: Path, extent: int) -> None:
    for chosen in itertools.combinations(ABOUT_WORKERS, extent):
        if set(chosen) >= EXCLUSIVE:
            continue
        manifests = by_name(render(everything(tmp_path, chosen)))
        for (kind, name), manifest in manifests.items():
            if kind == "ScaledObject":
                target = manifest["spec"]["scaleTargetRef"]
                goal = manifests[target.get("kind", "Deployment"), target["name"]]
                assert "replicas" not in goal["spec"], f"{name}: two would set replicas"
                assert manifest["spec"]["minReplicaCount"] == 2
        groups = manifests.get(("LeaderWorkerSet", "pageant-worker"))
        if groups is not None:
            assert manifests["Deployment", "pageant-worker"]["spec"]["replicas"] == 0
            group = groups["spec"]["leaderWorkerTemplate"]
            pod, other = group["leaderTemplate"]["spec"], group["workerTemplate"]["spec"]
            settings = load_settings(environ=environment([*manifests.values()], group["leaderTemplate"]))
            assert (settings.engine.tensor_parallel_size, settings.engine.executor) == (group["size"], "hosts")
            assert groups["spec"].get("replicas") == (None if "autoscaling" in chosen else 2)
            assert ("SHARE_BLOCKS" in str(pod)) == ("prefill" in chosen)
            program, address = other["containers"][0]["args"]
            assert program == "services.worker.hosts"
            assert address == f"tcp://$(LWS_LEADER_ADDRESS):{settings.deployment.rank_port}"
        if "prefill" in chosen:
            pod = manifests["Deployment", "pageant-prefill"]["spec"]["template"]["spec"]
            assert "WORKER_ROLE" in str(pod) and ("nvidia.com/gpu" in str(pod)) == ("gpu" in chosen)


def test_the_secrets_are_what_pods_mount(tmp_path: Path) -> None:
    made = subprocess.run(
        [ROOT / "make-secrets", "acme"],
        env={**os.environ, "IMAGE": "none"},
        capture_output=True,
        check=True,
        timeout=60,
    )
    found = by_name(read(made.stdout.decode()))
    for name, file in (("pageant-keys", "curve.json"), ("pageant-api-keys", "api-keys")):
        (tmp_path / file).write_bytes(base64.b64decode(found["Secret", name]["data"][file]))
    before = (tmp_path / "curve.json").read_bytes()
    assert len(load_keys(tmp_path).client_secret) == 40 and (tmp_path / "curve.json").read_bytes() == before
    settings = load_settings({"api_keys_file": str(tmp_path / "api-keys")}, environ={})
    key = (tmp_path / "api-keys").read_text().strip().removeprefix("acme:")
    assert make_access(settings.access).sender([("x-api-key", key)], "127.0.0.1") == "tenant acme"
    named = {
        volume["secret"]["secretName"]
        for _, template in pod_templates(render(ROOT / "base"))
        for volume in template["spec"]["volumes"]
        if "secret" in volume
    }
    assert named == {name for _, name in found}


def test_queries_name_metrics_that_exist() -> None:
    """What a Prometheus makes of them: tests/system/packages/test_prometheus.py."""
    listed = set(re.findall(r"^\| `([a-z_:]+)` \|", (ROOT.parent / "docs/reference/metrics.md").read_text(), re.M))
    listed.add("process_cpu_seconds_total")  # of the client library
    scaled = [one for one in render(ROOT / "example") if one["kind"] == "ScaledObject"]
    assert len(scaled) == 4
    for one in scaled:
        for trigger in one["spec"]["triggers"]:
            query = trigger["metadata"]["query"]
            assert set(re.findall(r"([a-z_:]+)\{", query)) <= listed
            assert set(re.findall(r'namespace="([^"]+)"', query)) == {one["metadata"]["namespace"]}
