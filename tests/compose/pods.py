"""The pods of deploy/ as containers of Docker: the same images, variables, users, mounts and probes, without a cluster.

What Kubernetes does by itself is not there: a Service is an alias of one container, nothing waits for `preStop`, and
policies, budgets and autoscalers do nothing.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from scripts.bench.common.stack import ROOT, Stack
from tests.unit.deploy.rendering import Manifest, pod_templates, read

ID = 1000  # of the user and the group that pods run as
WITHIN = "import sys, urllib.request as r; sys.exit(r.urlopen(sys.argv[1]).status != 200)"  # what kubelet's GET asks


def as_compose(manifests: list[Manifest], directory: Path, http_port: int, replicas: dict[str, int]) -> Stack:
    """A project that is not up yet, its gateway's HTTP at `http_port`; secrets lie in `directory`."""
    secrets = make_secrets(directory)
    services = {}
    for manifest, template in pod_templates(manifests):
        name = template["metadata"]["labels"]["app.kubernetes.io/component"]
        empty = directory / name
        empty.mkdir()
        to_the_group(empty, 0o2777)
        services[name] = container(manifests, manifest, template, secrets, empty)
        services[name]["deploy"] = {"replicas": replicas[name]}
    services["gateway"]["ports"] = [f"127.0.0.1:{http_port}:8000"]
    stack = Stack(f"pageant-pods-{os.getpid()}", http_port, directory)
    path = directory / "pods.yaml"
    path.write_text(json.dumps({"services": services}).replace("$", "$$"), encoding="utf-8")
    stack.environment["COMPOSE_FILE"] = str(path)
    return stack


def make_secrets(directory: Path) -> dict[tuple[str, str], Path]:
    """A file for each key of each secret, as Kubernetes makes them: root's, and readable by the pod's group."""
    made = subprocess.run([ROOT / "deploy" / "make-secrets", "acme"], capture_output=True, check=True, timeout=60)
    found = {}
    for secret in read(made.stdout.decode()):
        for file, content in secret["data"].items():
            path = directory / f"{secret['metadata']['name']}.{file}"
            path.write_bytes(base64.b64decode(content))
            to_the_group(path, 0o440)
            found[secret["metadata"]["name"], file] = path
    return found


def to_the_group(path: Path, mode: int) -> None:
    """As `fsGroup` has it: root's, and the group's.  Where only root may do that, all may read it."""
    if os.geteuid() == 0:
        os.chown(path, 0, ID)
    path.chmod(mode if os.geteuid() == 0 else mode | 0o004)


def container(
    manifests: list[Manifest], manifest: Manifest, template: Manifest, secrets: dict[tuple[str, str], Path], empty: Path
) -> dict[str, Any]:
    """One service of compose."""
    spec = template["spec"]
    (pod,) = spec["containers"]
    settings = {one["metadata"]["name"]: one["data"] for one in manifests if one["kind"] == "ConfigMap"}
    environment: dict[str, str] = {}
    for source in pod["envFrom"]:
        environment |= settings[source["configMapRef"]["name"]]
    environment |= {variable["name"]: variable["value"] for variable in pod.get("env", ())}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounts = [mounted(volumes[mount["name"]], mount, secrets, empty) for mount in pod["volumeMounts"]]
    user = spec["securityContext"]
    return {
        "image": pod["image"],
        "pull_policy": "never",
        "command": pod["args"],
        "environment": environment,
        "user": f"{user['runAsUser']}:{user['runAsGroup']}",
        "read_only": pod["securityContext"]["readOnlyRootFilesystem"],
        "cap_drop": pod["securityContext"]["capabilities"]["drop"],
        "security_opt": ["no-new-privileges:true"],
        "init": False,  # the service is the first process of its container, whom the kernel sends no default signals
        "volumes": mounts,
        "healthcheck": {"test": ["CMD", *probe(pod)], "interval": "2s", "timeout": "5s", "start_period": "120s"},
        "stop_grace_period": f"{spec['terminationGracePeriodSeconds']}s",
        "networks": {"default": {"aliases": [manifest["metadata"]["name"]]}},
    }


def probe(pod: Manifest) -> list[str]:
    """What decides whether it is ready."""
    readiness = pod["readinessProbe"]
    if "exec" in readiness:
        command: list[str] = readiness["exec"]["command"]
        return command
    (port,) = [port["containerPort"] for port in pod["ports"] if port["name"] == readiness["httpGet"]["port"]]
    return ["python", "-c", WITHIN, f"http://127.0.0.1:{port}{readiness['httpGet']['path']}"]


def mounted(volume: Manifest, mount: Manifest, secrets: dict[tuple[str, str], Path], empty: Path) -> dict[str, Any]:
    """A mount in compose's words; `empty` is a directory that replicas share, where each pod would have its own."""
    target = mount["mountPath"]
    if volume.get("emptyDir", {}).get("medium") == "Memory":
        return {"type": "tmpfs", "target": target}
    if "emptyDir" in volume:  # a tmpfs would have the mode of the image's directory, whatever is asked
        source = empty
    elif "secret" in volume:
        source = secrets[volume["secret"]["secretName"], mount["subPath"]]
    else:
        source = ROOT / "models"
    return {"type": "bind", "source": str(source), "target": target, "read_only": mount.get("readOnly", False)}
