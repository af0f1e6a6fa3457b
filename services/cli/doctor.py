"""`pageant doctor`: whether this machine can serve, and what has to be changed first."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import click

from services.cli.checks import Finding, examine_model
from services.cli.checks import examine as examine_settings
from shared.config import FurtherModel, Settings, settings_environment, settings_of_model

PACKAGES = {"torch": "worker", "safetensors": "worker", "tokenizers": "tokenizer", "jinja2": "tokenizer"}
OLDEST_PYTHON = (3, 11)
COLORS = {"ok": "green", "note": "yellow", "wrong": "red"}
PLAN_TIMEOUT = 300.0  # the native kernels may have to be compiled
GIB = 1 << 30


def doctor(settings: Settings, models: Sequence[FurtherModel] = ()) -> int:
    """Print every finding, also of the models beside the first; 1 where something is wrong."""
    wrong = 0
    findings = [*examine(settings)]
    for model in models:
        found = examine_model(settings_of_model(settings, model), workers=model.workers)
        findings += [Finding(one.verdict, one.subject, f"{model.name}: {one.text}") for one in found]
    for finding in findings:
        wrong += finding.verdict == "wrong"
        mark = click.style(f"{finding.verdict:5}", fg=COLORS[finding.verdict])
        click.echo(f"{mark}  {finding.subject:12}  {finding.text}")
    click.echo("ready to serve" if not wrong else f"{wrong} to put right before `pageant serve` can work")
    return 1 if wrong else 0


def examine(settings: Settings) -> Iterator[Finding]:
    """The checks of `pageant serve`, and those that need a process with torch."""
    yield check_python()
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    for name in missing:
        yield Finding("wrong", name, f"not installed; pip install 'pageant[{PACKAGES[name]}]'")
    model_is_wrong = False
    for finding in examine_settings(settings):
        model_is_wrong |= finding.verdict == "wrong" and finding.subject in ("model", "memory")
        yield finding
    if "torch" not in missing and not model_is_wrong:
        yield from check_plan(ask_plan(settings))


def check_python() -> Finding:
    version = platform.python_version()
    if sys.version_info < OLDEST_PYTHON:
        return Finding("wrong", "python", f"{version}; 3.11 or newer is needed")
    return Finding("ok", "python", f"{version} at {sys.executable}")


def ask_plan(settings: Settings) -> dict[str, Any]:
    """The worker's own plan, from a process of its own: only that one imports torch."""
    command = [sys.executable, "-m", "services.worker.plan"]
    environment = os.environ | settings_environment(settings) | {"HF_HUB_OFFLINE": "1"}  # looks, never downloads
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=PLAN_TIMEOUT, check=False
        )
        plan = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {"error": f"no memory plan within {PLAN_TIMEOUT:g} s"}
    except ValueError:
        return {"error": (done.stderr.strip().splitlines() or ["the worker's plan is empty"])[-1]}
    return plan if isinstance(plan, dict) else {"error": "the worker's plan is no object"}


def check_plan(plan: dict[str, Any]) -> Iterator[Finding]:
    if "device" in plan:
        yield Finding("ok", "device", f"{plan['device']} ({plan['device_name']}), torch {plan['torch']}")
    if "error" in plan:
        yield Finding("wrong", "memory", " ".join(str(plan["error"]).split()))
        return
    yield check_kernels(plan)
    yield check_fingerprint(plan)
    longest = plan["max_model_len"]
    text = (
        f"{plan['bytes'] / GIB:.2f} GiB of KV cache: {plan['num_blocks']} blocks of "
        f"{plan['block_size']} tokens hold {plan['num_tokens']} tokens, "
        f"{plan['num_tokens'] / longest:.1f} requests of max_model_len={longest}"
    )
    if plan["state_bytes"]:
        text += (
            f"; {plan['state_bytes'] / GIB:.2f} GiB of it are states of linear attention: of {plan['max_num_seqs']} "
            f"sequences at once, and {plan['num_snapshots']} snapshots"
        )
    yield Finding("ok", "memory", text)


def check_kernels(plan: dict[str, Any]) -> Finding:
    if plan["no_native"]:
        return Finding("note", "kernels", f"torch, several times slower than the native ones: {plan['no_native']}")
    return Finding("ok", "kernels", f"{plan['kernels']}, {plan['num_threads']} threads; {plan['formats']}")


def check_fingerprint(plan: dict[str, Any]) -> Finding:
    """What answers call `system_fingerprint`: every worker of a deployment must have the same."""
    parts = plan["fingerprint"]
    named = f"{parts['executor']}, {parts['numeric_class']}; weights {parts['weights'][:12] or 'not digested yet'}"
    if not plan["system_fingerprint"]:
        return Finding("ok", "fingerprint", f"known once the weights were loaded; {named}")
    return Finding("ok", "fingerprint", f"{plan['system_fingerprint']}: {named}")
