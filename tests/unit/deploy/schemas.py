"""The official JSON schemas of Kubernetes, as the package kubernetes-validate has them; and those of custom resources.

PAGEANT_TEST_CRDS names a directory with the definitions (YAML) of KEDA, KubeRay, LeaderWorkerSet and the Prometheus
operator: then custom resources are judged by these.  Without it their pods and autoscaling are judged by Kubernetes'
own schemas of the same things, and the rest by the names of fields.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from tests.unit.deploy.rendering import Manifest, read

PACKAGE = "kubernetes_validate"
CRDS = os.environ.get("PAGEANT_TEST_CRDS", "")
POD, BEHAVIOR = "io.k8s.api.core.v1.PodTemplateSpec", "io.k8s.api.autoscaling.v2.HorizontalPodAutoscalerBehavior"
DEFINITIONS = "_definitions.json"

TEXT, NUMBER, ANYTHING = {"type": "string"}, {"type": "integer"}, {"type": "object"}


def _fields(required: str, /, **fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": required.split(), "additionalProperties": False}


def _definition(name: str) -> dict[str, str]:
    return {"$ref": f"{DEFINITIONS}#/$defs/{name}"}


# The fields that deploy/ uses, of each `spec`.
_HPA = _fields("behavior", behavior=_definition(BEHAVIOR))
_RAY_GROUP = {
    "rayStartParams": {"type": "object", "additionalProperties": TEXT},
    "template": _definition(POD),
}
_METADATA = {"type": "object", "additionalProperties": TEXT, "required": ["serverAddress", "query", "threshold"]}
OWN = {
    "ScaledObject": _fields(
        "scaleTargetRef triggers",
        scaleTargetRef=_fields("name", name=TEXT, kind=TEXT, apiVersion=TEXT),
        minReplicaCount=NUMBER,
        maxReplicaCount=NUMBER,
        pollingInterval=NUMBER,
        fallback=_fields("failureThreshold replicas", failureThreshold=NUMBER, replicas=NUMBER, behavior=TEXT),
        advanced=_fields("", horizontalPodAutoscalerConfig=_HPA),
        triggers={"type": "array", "items": _fields("type metadata", type=TEXT, name=TEXT, metadata=_METADATA)},
    ),
    "PodMonitor": _fields(
        "selector podMetricsEndpoints",
        selector=_fields("matchLabels", matchLabels=ANYTHING),
        podMetricsEndpoints={
            "type": "array",
            "items": _fields("port", port=TEXT, interval=TEXT, scrapeTimeout=TEXT),
        },
    ),
    "RayJob": _fields(
        "entrypoint rayClusterSpec",
        entrypoint=TEXT,
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
        shutdownAfterJobFinishes={"type": "boolean"},
        backoffLimit=NUMBER,
        rayClusterSpec=_fields(
            "headGroupSpec",
            rayVersion=TEXT,
            headGroupSpec=_fields("template", **_RAY_GROUP),
            workerGroupSpecs={
                "type": "array",
                "items": _fields(
                    "groupName template",
                    groupName=TEXT,
                    replicas=NUMBER,
                    minReplicas=NUMBER,
                    maxReplicas=NUMBER,
                    **_RAY_GROUP,
                ),
            },
        ),
    ),
    "LeaderWorkerSet": _fields(
        "leaderWorkerTemplate",
        replicas=NUMBER,
        rolloutStrategy=_fields("type", type=TEXT, rollingUpdateConfiguration=ANYTHING),
        leaderWorkerTemplate=_fields(
            "workerTemplate",
            size=NUMBER,
            restartPolicy=TEXT,
            leaderTemplate=_definition(POD),
            workerTemplate=_definition(POD),
        ),
    ),
}


def is_installed() -> bool:
    return importlib.util.find_spec(PACKAGE) is not None


def objections(manifest: Manifest, version: str) -> list[str]:
    """What the schema of its kind has against a manifest."""
    schema = _custom(manifest["kind"]) if manifest["kind"] in OWN else _official(manifest, version)
    validator = Draft202012Validator(schema, registry=_registry(version))
    return [f"{error.json_path}: {error.message[:300]}" for error in validator.iter_errors(manifest)]


def _folder(version: str) -> Path:
    """All fields are named there: one that is not is refused (`strict`)."""
    found = importlib.util.find_spec(PACKAGE)
    assert found is not None and found.submodule_search_locations
    schemas = Path(found.submodule_search_locations[0]) / "kubernetes-json-schema"
    (folder,) = schemas.glob(f"v{version}.*-local-strict")
    return folder


def _official(manifest: Manifest, version: str) -> Any:
    group, _, number = manifest["apiVersion"].rpartition("/")
    name = "-".join([manifest["kind"].lower(), *([group.partition(".")[0]] if group else []), number])
    return json.loads((_folder(version) / f"{name}.json").read_text(encoding="utf-8"))


@cache
def _registry(version: str) -> Registry[Any]:
    contents = json.loads((_folder(version) / DEFINITIONS).read_text(encoding="utf-8"))
    resource: Any = Resource.from_contents(contents, default_specification=DRAFT202012)
    registry: Registry[Any] = Registry().with_resource(DEFINITIONS, resource)
    return registry


def _custom(kind: str) -> Any:
    if CRDS:
        return _closed(_definitions()[kind])
    return {"type": "object", "properties": {"spec": OWN[kind]}, "required": ["apiVersion", "kind", "metadata", "spec"]}


@cache
def _definitions() -> dict[str, Any]:
    """By kind, the schema of the version that is stored."""
    found: dict[str, Any] = {}
    for path in sorted(Path(CRDS).glob("*.yaml")):
        for crd in read(path.read_text(encoding="utf-8")):
            (stored,) = [one for one in crd["spec"]["versions"] if one["storage"]]
            found[crd["spec"]["names"]["kind"]] = stored["schema"]["openAPIV3Schema"]
    return found


def _closed(schema: Any) -> Any:
    """The same schema, refusing fields that it does not name: Kubernetes would drop them without a word."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object" and not is_open:
        closed["additionalProperties"] = False
    return closed


def kinds_without_definition() -> Iterator[str]:
    """Custom kinds of which PAGEANT_TEST_CRDS has no definition."""
    yield from OWN.keys() - _definitions().keys()
