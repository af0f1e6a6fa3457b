"""What runs each command of the documents: the first entry whose words a command begins with.

A command that is new in a document and that no entry knows fails the test, which says so: run it in
tests/system/commands/test_docs.py, name what runs it, or say what it needs that a test machine has not.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """tests/system/commands/test_docs.py runs it as it stands, against a deployment of its own."""


@dataclass(frozen=True)
class RunBy:
    """A test or script runs it, perhaps with other arguments: `word` stands in that file."""

    path: str
    word: str


@dataclass(frozen=True)
class Needs:
    """It cannot run where tests do; that its program, files and options exist is tested all the same."""

    what: str


How = Run | RunBy | Needs

DOCKER = Needs("a Docker engine")
TABLE: dict[str, How] = {
    "source .venv/bin/activate": RunBy("scripts/setup", ".venv"),
    "pip install": Needs("a package index"),
    "lm_eval run": RunBy("tests/system/packages/test_lm_eval.py", "lm_eval"),
    # -- a running deployment
    "curl localhost:8000/deployment/restart": RunBy("tests/unit/gateway/http/test_deployment.py", "restart"),
    "curl localhost:8000/deployment/scale": RunBy("tests/unit/gateway/http/test_deployment.py", "scale"),
    "curl": Run(),
    "pageant doctor": Run(),
    "pageant serve -m DIR --tensor-parallel-size 2 --executor hosts": RunBy(
        "tests/system/deployment/test_ranks.py", '"hosts"'
    ),
    "pageant serve -m DIR --tensor-parallel-size 2 --enable-expert-parallel": RunBy(
        "tests/system/deployment/test_ranks.py", "--enable-expert-parallel"
    ),
    "pageant serve --tensor-parallel-size 2 --device cuda": Needs("two GPUs"),
    "pageant serve --tensor-parallel-size 2 --kernels torch": RunBy("tests/system/deployment/test_ranks.py", '"torch"'),
    "pageant serve --executor ray": RunBy("tests/system/deployment/test_ray.py", '"ray"'),
    "pageant serve --store-memory 1GiB --store-backend": RunBy(
        "tests/system/deployment/test_stores.py", "--store-backend"
    ),
    "pageant rank": RunBy("tests/system/deployment/test_ranks.py", '"rank"'),
    "pageant serve": Run(),
    "pageant generate --address ipv4": Needs("two hosts"),
    "pageant generate": Run(),
    "pageant chat": Run(),
    "pageant top": Run(),
    "pageant launch": RunBy("tests/system/packages/test_agents.py", "launch"),
    "pageant model": RunBy("tests/system/deployment/test_models.py", '"model"'),
    "pageant scale": Run(),
    "pageant restart": Run(),
    "pageant trace --otlp": RunBy("tests/unit/cli/trace/test_exports.py", "otlp"),
    "pageant trace -l logs/ --otlp": RunBy("tests/unit/cli/trace/test_exports.py", "otlp"),
    "pageant trace": Run(),
    "pageant replay mailbox.rec": RunBy("tests/unit/scheduler/recording/test_replay.py", "invariants"),
    "pageant replay": RunBy("tests/unit/scheduler/recording/test_replay.py", "replay"),
    # -- benches
    "pageant bench serve": RunBy("tests/system/commands/test_bench.py", "serve"),
    "pageant bench kernels": Run(),
    "pageant bench messages": Run(),
    "pageant bench offline": RunBy("tests/system/commands/test_bench.py", "offline"),
    "pageant bench": RunBy("tests/system/commands/test_bench.py", "bench"),
    "pageant simulate": RunBy("tests/system/commands/test_bench.py", "simulate"),
    # -- containers
    "docker": DOCKER,
    "scripts/roll": Needs("a Docker engine; tests/compose runs it"),
    "scripts/chaos --compose": Needs("a Docker engine; tests/compose runs it"),
    # -- scripts
    "scripts/quickstart": RunBy("tests/system/commands/test_commands.py", "quickstart"),
    "scripts/chart": RunBy("tests/unit/docs/test_measurements.py", "scripts.documents.chart"),
    "scripts/record_demo": RunBy("tests/system/loss/test_recording.py", "scene"),
    "scripts/reference": RunBy("tests/unit/docs/test_reference.py", "scripts.documents.reference.main"),
    "scripts/prove_clients": RunBy("tests/system/packages/test_clients.py", "prove_clients"),
    "scripts/test": RunBy("scripts/test", "pytest"),
    "python -m tests.short": RunBy("tests/unit/test_short.py", "made(measured("),
    "scripts/setup": RunBy("scripts/test", "scripts/setup"),
    "scripts/protos": Needs("a change in protos/"),
    "scripts/chaos": RunBy("tests/system/loss/test_loss.py", "test_the_short_chaos_changes_nothing"),
    "scripts/soak": RunBy("tests/system/loss/test_soak.py", "soak"),
    "scripts/bench_gpu": Needs("a GPU"),
    "scripts/bench_peers": Needs("other engines"),
    "scripts/bench_": Needs("a machine with nothing else to do"),
    "scripts/run": RunBy("scripts/chaos", "run"),
    "scripts/mutate": Needs("an hour"),
    "scripts/make_quantised_fixtures": Needs("a package index"),
    "scripts/prove_lm_eval": RunBy("tests/system/packages/test_lm_eval.py", "lm_eval"),
    "scripts/prove_batches": RunBy("tests/system/requests/test_batches.py", "perform"),
    "scripts/prove_agents": RunBy("tests/system/packages/test_agents.py", "prove_agents"),
    "scripts/prove_frameworks": RunBy("tests/system/packages/test_frameworks.py", "prove_frameworks"),
    "scripts/prove_vllm_http": Needs("a package index"),
    "scripts/prove_ray": RunBy("tests/system/deployment/test_ray.py", "ray_cluster"),
    "scripts/prove_node": RunBy("tests/system/packages/test_node.py", "node"),
    # -- tests and modules
    "pytest": RunBy("scripts/test", "pytest"),
    "python -m examples.": RunBy("tests/system/packages/test_examples.py", "examples."),
    "python -m services.": RunBy("services/cli/supervision/processes.py", "services."),
    "python -m scripts.demo_model": Needs("a corpus and hours"),
}


def how(command: str) -> How | None:
    """What runs it; None where nothing is known to."""
    return next((entry for begin, entry in TABLE.items() if command.startswith(begin)), None)
