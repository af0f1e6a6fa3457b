"""What `kustomize build` makes of deploy/, as far as deploy/ uses it; without its order and the digests in names.

A test compares it with kustomize where that is installed; everywhere else the manifests are judged by this.
"""

from __future__ import annotations

import copy
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]

ROOT = Path(__file__).resolve().parents[3] / "deploy"
KUSTOMIZE = os.environ.get("PAGEANT_TEST_KUSTOMIZE") or shutil.which("kustomize")
KNOWN = {
    "apiVersion", "kind", "namespace", "resources", "components", "labels", "configurations", "patches",
    "replacements", "images", "replicas", "configMapGenerator",
}  # fmt: skip
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast where it was compiled
DIGEST = re.compile(r"(pageant-settings)-[0-9a-z]{10}\b")


def render(directory: Path) -> list[Manifest]:
    """All manifests of one kustomization.  Raises AssertionError where it uses what is not known here."""
    return _added([], directory)


def build(directory: Path) -> list[Manifest]:
    """The same by kustomize itself, digests cut off."""
    done = subprocess.run([str(KUSTOMIZE), "build", directory], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return read(DIGEST.sub(r"\1", done.stdout))


def read(text: str) -> list[Any]:
    """All documents of a YAML file."""
    return list(yaml.load_all(text, LOADER))


def identity(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


def pod_templates(manifests: list[Manifest]) -> Iterator[tuple[Manifest, Manifest]]:
    """Each manifest that makes pods, with its template, or both of a group."""
    for manifest in manifests:
        spec = manifest.get("spec", {})
        group = spec.get("leaderWorkerTemplate", {})
        for template in (spec.get("template"), group.get("leaderTemplate"), group.get("workerTemplate")):
            if template:
                yield manifest, template


def _added(manifests: list[Manifest], directory: Path) -> list[Manifest]:
    """What is there, changed and extended by one directory's kustomization."""
    (plan,) = read((directory / "kustomization.yaml").read_text(encoding="utf-8"))
    assert not plan.keys() - KNOWN, plan.keys() - KNOWN
    own: list[Manifest] = []
    for name in plan.get("resources", ()):
        path = (directory / name).resolve()
        own += render(path) if path.is_dir() else read(path.read_text(encoding="utf-8"))
    found = [*manifests, *own]
    for generator in plan.get("configMapGenerator", ()):
        _generate(found, generator)
    for name in plan.get("components", ()):
        found = _added(found, (directory / name).resolve())
    for patch in plan.get("patches", ()):
        text = patch.get("patch") or (directory / patch["path"]).read_text(encoding="utf-8")
        for manifest in found:
            if all(re.fullmatch(wanted, value) for wanted, value in _wanted(patch["target"], manifest)):
                for operations in read(text):
                    for operation in operations:
                        _operate(manifest, operation)
    _transform(found, plan)
    return found


def _wanted(target: Manifest, manifest: Manifest) -> Iterator[tuple[str, str]]:
    kind, name = identity(manifest)
    yield target.get("kind", ".*"), kind
    yield target.get("name", ".*"), name
    if "annotationSelector" in target:
        key, _, value = target["annotationSelector"].partition("=")
        yield value, manifest["metadata"].get("annotations", {}).get(key, "")


def _generate(manifests: list[Manifest], generator: Manifest) -> None:
    data = dict(literal.split("=", 1) for literal in generator["literals"])
    if generator.get("behavior") == "merge":
        (old,) = [one for one in manifests if identity(one) == ("ConfigMap", generator["name"])]
        old["data"] |= data
    else:
        metadata = {"name": generator["name"]}
        manifests.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})


def _operate(manifest: Manifest, operation: Manifest) -> None:
    """One operation of RFC 6902, of the three that are used."""
    *way, last = operation["path"].removeprefix("/").split("/")
    place: Any = manifest
    for step in way:
        place = place[int(step)] if isinstance(place, list) else place[step]
    match operation["op"]:
        case "add" if isinstance(place, list):
            assert last == "-"
            place.append(copy.deepcopy(operation["value"]))
        case "add":
            place[last] = copy.deepcopy(operation["value"])
        case "replace":
            assert last in place
            place[last] = copy.deepcopy(operation["value"])
        case "remove":
            del place[last]
        case other:
            raise AssertionError(other)


def _transform(manifests: list[Manifest], plan: Manifest) -> None:
    for label in plan.get("labels", ()):
        for manifest in manifests:
            manifest["metadata"].setdefault("labels", {}).update(label["pairs"])
            template = (
                manifest["spec"].get("template") if label.get("includeTemplates") and "spec" in manifest else None
            )
            if template:
                template["metadata"].setdefault("labels", {}).update(label["pairs"])
    for replacement in plan.get("replacements", ()):
        source = replacement["source"]
        (there,) = [one for one in manifests if identity(one) == (source["kind"], source["name"])]
        for target in replacement["targets"]:
            (here,) = [one for one in manifests if identity(one) == tuple(target["select"].values())]
            for field in target["fieldPaths"]:
                value = _at(there, source["fieldPath"])
                _operate(here, {"op": "replace", "path": "/" + field.replace(".", "/"), "value": value})
    for wanted in plan.get("replicas", ()):
        for manifest in manifests:
            if manifest["metadata"]["name"] == wanted["name"] and manifest["kind"] in ("Deployment", "StatefulSet"):
                manifest["spec"]["replicas"] = wanted["count"]
    images = {image["name"]: f"{image['newName']}:{image['newTag']}" for image in plan.get("images", ())}
    for _, template in pod_templates(manifests):
        for container in template["spec"].get("containers", ()):
            container["image"] = images.get(container["image"], container["image"])
    if namespace := plan.get("namespace"):
        for manifest in manifests:
            manifest["metadata"]["namespace"] = namespace


def _at(manifest: Manifest, path: str) -> Any:
    value: Any = manifest
    for step in path.split("."):
        value = value[step]
    return value
