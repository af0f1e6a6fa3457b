"""Who may import whom, read from the syntax trees; and what a fresh interpreter loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("shared", "engine", "services", "kernels", "protos")
STDLIB = sys.stdlib_module_names

# A wing of the scheduler -> the wings that it stands on.
WINGS: dict[str, set[str]] = {
    "blocks": set(),
    "draft_length": set(),
    "state": {"blocks", "draft_length"},
    "telemetry": {"blocks", "state"},
    "speculation": {"draft_length", "state"},
    "consistency": {"blocks", "state", "telemetry"},
    "planning": {"blocks", "draft_length", "speculation", "state", "telemetry"},
    "lifecycle": {"blocks", "consistency", "speculation", "state", "telemetry"},
    "recording": {"scheduler", "state"},
    "membership": set(),
}

ZMQ = ("addresses", "inbox", "ipc", "listener_rests", "outbox", "tcp", "watch", "zeromq")  # modules of the transport

# Package or module -> what it may import beside itself: top-level names, or dotted prefixes of our own.
ALLOWED: dict[str, set[str]] = {
    "shared.messages": {"STDLIB", "msgspec", "shared.errors", "shared.requests.sampling", "shared.packing"},
    "shared.transport": {"STDLIB", "msgspec", "structlog", "shared"},
    **{f"shared.transport.{module}": {"STDLIB", "zmq", "structlog", "shared"} for module in ZMQ},
    "shared.transport.keys": {"STDLIB", "zmq", "msgspec", "shared"},
    "shared.data_link": {"STDLIB", "deflate", "structlog", "shared.data_link", "shared.errors",
                         "shared.transport.directory"},
    "shared.data_link.copying": {"STDLIB", "numpy"},
    "shared.actor": {"STDLIB", "uvloop", "msgspec", "structlog", "prometheus_client", "shared"},
    "shared.automata": {"STDLIB", "llguidance", "msgspec", "shared.requests.grammar"},
    "shared.automata.automaton": {"STDLIB", "llguidance", "numpy", "shared.automata"},
    "shared.automata.vocabulary": {"STDLIB", "llguidance", "tokenizers", "msgspec", "shared.automata",
                                   "shared.text.pieces", "shared.text.tokenization"},
    "engine.weights": {"STDLIB", "torch", "numpy", "safetensors", "tqdm", "shared", "kernels", "engine.description"},
    "engine.sampling": {"STDLIB", "torch", "numpy", "msgspec", "shared", "kernels"},
    "engine.lora": {"STDLIB", "blake3", "torch", "msgspec", "shared", "kernels", "engine.description",
                    "engine.weights"},
    "engine.modeling": {"STDLIB", "torch", "numpy", "msgspec", "shared", "kernels", "engine.description",
                        "engine.lora", "engine.weights"},
    "engine.heads": {"STDLIB", "torch", "numpy", "shared", "kernels", "engine.description", "engine.execution",
                     "engine.modeling", "engine.sampling", "engine.weights"},
    "engine.execution": {"STDLIB", "torch", "numpy", "msgspec", "structlog", "shared", "kernels", "engine.lora",
                         "engine.sampling", "engine.modeling"},
    "engine.loading": {"STDLIB", "torch", "numpy", "tqdm", "msgspec", "structlog", "shared", "kernels", "engine"},
    "engine.description": {"STDLIB", "shared.errors"},
    "engine": {"STDLIB"},
    "shared": {"STDLIB", "msgspec", "structlog", "tokenizers", "huggingface_hub", "shared"},
    "services.scheduler": {"STDLIB", "msgspec", "shared", "structlog", "prometheus_client"},
    **{
        f"services.scheduler.{wing}": {
            "STDLIB", "msgspec", "shared", *(f"services.scheduler.{below}" for below in WINGS[wing])
        }
        for wing in WINGS
    },
    "services.scheduler.publishing": {"STDLIB", "msgspec", "structlog", "zmq", "shared.errors",
                                      "services.scheduler.blocks"},
    "services.fork_server": {"STDLIB", "msgspec", "shared"},
    "services.simulator": {"STDLIB", "msgspec", "shared", "services.scheduler"},
    "services.draft": {"STDLIB", "msgspec", "structlog", "torch", "numpy", "shared", "engine", "kernels"},
    "services.worker": {"STDLIB", "msgspec", "structlog", "torch", "numpy", "tqdm", "shared", "engine", "kernels"},
    "services.worker.ray": {"STDLIB", "ray", "msgspec", "structlog", "shared", "services.worker.groups.rank_processes"},
    "services.worker.ray.needs": {"STDLIB", "shared.config"},
    # the gateway: its actor may import all of it; a wing only what is named, and no two name each other
    "services.gateway": {"STDLIB", "prometheus_client", "structlog", "shared"},
    "services.gateway.bus": {"STDLIB", "shared"},
    "services.gateway.streams": {"STDLIB", "msgspec", "structlog", "shared", "services.gateway.bus"},
    "services.gateway.access": {"STDLIB", "msgspec", "shared", "services.gateway.streams"},
    "services.gateway.health": {"STDLIB", "protos", "shared", "services.gateway.bus"},
    "services.gateway.generation": {"STDLIB", "msgspec", "structlog", "shared", "services.gateway.bus",
                                    "services.gateway.streams", "services.gateway.access", "services.gateway.health"},
    "services.gateway.grpc": {"STDLIB", "msgspec", "structlog", "grpc", "grpc_health", "grpc_reflection", "google",
                              "protos", "shared", "services.gateway.bus", "services.gateway.streams",
                              "services.gateway.access", "services.gateway.health", "services.gateway.generation"},
    "services.gateway.http": {"STDLIB", "msgspec", "starlette", "prometheus_client", "shared",
                              "services.gateway.access", "services.gateway.health", "services.gateway.generation"},
    "services.gateway.http.parsing": {"STDLIB", "msgspec"},
    "services.gateway.http.parsing.reading": {"STDLIB", "msgspec"},
    "services.gateway.http.parsing.formats": {"STDLIB", "msgspec", "services.gateway.http.parsing.reading"},
    "services.gateway.http.errors": {"STDLIB", "msgspec", "structlog", "starlette", "shared", "services.gateway.bus",
                                     "services.gateway.access"},
    "services.gateway.http.connection": {"STDLIB", "structlog", "starlette", "uvicorn", "shared",
                                         "services.gateway.access", "services.gateway.http.errors"},
    "services.gateway.http.middleware": {"STDLIB", "starlette", "shared", "services.gateway.access",
                                         "services.gateway.health", "services.gateway.http.errors"},
    "services.gateway.http.deployment": {"STDLIB", "msgspec", "starlette", "shared", "services.gateway.http.requests",
                                         "services.gateway.http.answers"},
    "services.gateway.http.requests": {"STDLIB", "msgspec", "structlog", "starlette", "shared",
                                       "services.gateway.streams", "services.gateway.access",
                                       "services.gateway.generation", "services.gateway.http.errors",
                                       "services.gateway.http.parsing"},
    "services.gateway.http.answers": {"STDLIB", "msgspec", "starlette", "shared", "services.gateway.streams",
                                      "services.gateway.http.errors", "services.gateway.http.requests"},
    "services.gateway.http.completions": {"STDLIB", "msgspec", "starlette", "shared", "services.gateway.streams",
                                          "services.gateway.generation", "services.gateway.http.requests",
                                          "services.gateway.http.answers"},
    "services.gateway.http.conversation": {"STDLIB", "msgspec", "shared", "services.gateway.streams",
                                           "services.gateway.http.requests", "services.gateway.http.parsing"},
    "services.gateway.http.pooling": {"STDLIB", "msgspec", "starlette", "shared", "services.gateway.generation",
                                      "services.gateway.http.requests", "services.gateway.http.answers",
                                      "services.gateway.http.conversation"},
    "services.gateway.http.chat": {"STDLIB", "msgspec", "starlette", "shared", "services.gateway.streams",
                                   "services.gateway.generation", "services.gateway.http.requests",
                                   "services.gateway.http.answers", "services.gateway.http.parsing",
                                   "services.gateway.http.conversation"},
    "services.gateway.http.responses": {"STDLIB", "msgspec", "structlog", "starlette", "shared",
                                        "services.gateway.streams",
                                        "services.gateway.http.requests", "services.gateway.http.answers",
                                        "services.gateway.http.parsing", "services.gateway.http.conversation"},
    "services.gateway.http.files": {"STDLIB", "msgspec", "python_multipart", "starlette", "shared",
                                    "services.gateway.access", "services.gateway.http.errors",
                                    "services.gateway.http.middleware", "services.gateway.http.requests",
                                    "services.gateway.http.answers"},
    "services.gateway.http.batches": {"STDLIB", "msgspec", "structlog", "starlette", "shared",
                                      "services.gateway.access", "services.gateway.http.middleware",
                                      "services.gateway.http.requests", "services.gateway.http.answers",
                                      "services.gateway.http.files"},
    "services.gateway.http.messages": {"STDLIB", "msgspec", "starlette", "shared", "services.gateway.streams",
                                       "services.gateway.http.errors",
                                       "services.gateway.http.requests", "services.gateway.http.answers",
                                       "services.gateway.http.parsing", "services.gateway.http.conversation"},
    "services.tokenizer": {"STDLIB", "msgspec", "structlog", "tokenizers", "jinja2", "shared"},
    "services.detokenizer": {"STDLIB", "msgspec", "structlog", "tokenizers", "shared"},
    "services.store": {"STDLIB", "structlog", "prometheus_client", "shared"},
    "services.store.backends.mooncake": {"STDLIB", "mooncake", "services.store.backends", "shared"},
    "services.store.backends.nixl": {"STDLIB", "nixl", "services.store.backends", "shared"},
    "services.cli": {"STDLIB", "msgspec", "structlog", "click", "grpc", "grpc_health", "google", "shared", "protos",
                     "tqdm", "matplotlib"},
    "services.cli.simulate": {"STDLIB", "msgspec", "click", "tqdm", "shared", "services.cli", "services.simulator",
                              "services.scheduler"},
    "services.cli.trace": {"STDLIB", "msgspec", "click", "shared", "services.cli.command_line.help",
                           "services.cli.display.tables"},
    "services.cli.display.top": {"STDLIB", "msgspec", "click", "prometheus_client", "shared", "services.cli"},
    "services.cli.replay": {"STDLIB", "click", "shared", "services.cli.command_line.help", "services.scheduler"},
    "services.cli.display.plots": {"STDLIB", "click", "matplotlib", "services.cli", "services.simulator"},
    "services.cli.checks": {"STDLIB", "msgspec", "shared", "engine.description", "engine.loading.memory",
                            "engine.weights.inventory", "engine.weights.quantised", "services.gateway.access.auth"},
    "engine.weights.inventory": {"STDLIB", "shared.errors", "engine.description", "engine.weights.quantised"},
    "services.cli.bench": {"STDLIB", "msgspec", "click", "tqdm", "grpc", "uvloop", "shared", "protos", "services.cli"},
    "services.cli.bench.serve": {"STDLIB", "msgspec", "click", "tqdm", "grpc", "uvloop", "shared", "services.cli",
                                 "services.simulator"},
    "services.cli.bench.http_backend": {"STDLIB", "msgspec", "click", "httpx2", "shared", "services.cli"},
    "services.cli.bench.messages": {"STDLIB", "shared", "services.cli", "services.detokenizer", "services.scheduler"},
    "services.cli.bench.kernels": {"STDLIB", "click", "torch", "shared", "kernels", "services.cli",
                                   "services.simulator"},
    "shared.exposition": {"STDLIB", "msgspec", "prometheus_client", "shared"},
    "shared.client": {"STDLIB", "grpc", "msgspec", "protos", "shared.errors", "shared.tracing.explanation"},
    "shared.metrics": {"STDLIB", "msgspec"},
    "shared.workload": {"STDLIB", "msgspec", "shared.packing", "shared.workload"},
    "kernels.ops": {"torch", "numpy", "STDLIB"},
    "kernels.cpu": {"torch", "numpy", "STDLIB", "kernels.ops"},
    "kernels.triton": {"torch", "numpy", "STDLIB", "triton", "kernels.ops"},
    "kernels.flash": {"torch", "numpy", "STDLIB", "kernels.ops"},
    "kernels": {"torch", "STDLIB", "kernels.ops", "kernels.cpu", "kernels.triton", "kernels.flash"},
    "protos": {"STDLIB", "google", "grpc", "protos"},
}  # fmt: skip
SHELLS = {"actor", "block_traffic", "links", "sleep", "main", "__main__", "publisher"}
PURE_FORBIDDEN = {"zmq", "asyncio", "time", "torch", "random", "structlog", "numpy", "prometheus_client"}
UNSAFE = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}
MOST_FILES = 16  # of a folder, __init__ and __main__ among them
NO_TORCH = ("gateway", "tokenizer", "scheduler", "detokenizer", "draft", "store")


def modules(packages: Iterable[str] = PACKAGES) -> Iterator[tuple[str, ast.Module]]:
    """Dotted name and tree of every module of the project."""
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.stem.endswith(("_pb2", "_pb2_grpc")):
                continue
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            yield name, ast.parse(path.read_text(encoding="utf-8"))


def imports(tree: ast.AST) -> Iterator[str]:
    """Every dotted name that a module imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""


def import_graph(packages: Iterable[str]) -> dict[str, set[str]]:
    """Module -> the modules that it imports wherever in it, `if TYPE_CHECKING` included.

    `from package import module` imports the module.  That Python loads every package's `__init__` first is not drawn.
    """
    plain: dict[str, set[str]] = {}  # by module: `import name`
    froms: dict[str, list[tuple[str, set[str]]]] = {}  # `from name import ...`; trees themselves are not kept
    for name, tree in modules(packages):
        plain[name], froms[name] = set(), []
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                plain[name].update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                froms[name].append((node.module, {f"{node.module}.{alias.name}" for alias in node.names}))
    graph: dict[str, set[str]] = {}
    for name, found in plain.items():
        for module, members in froms[name]:
            found |= members if members <= plain.keys() else {module, *members}
        graph[name] = found & plain.keys() - {name}
    return graph


def circles(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """The strongly connected components with more than one module, by Kosaraju's two searches."""
    reverse: dict[str, set[str]] = {name: set() for name in graph}
    for name, imported in graph.items():
        for other in imported:
            reverse[other].add(name)

    def search(name: str, edges: Mapping[str, set[str]], seen: set[str], found: list[str]) -> list[str]:
        if name not in seen:
            seen.add(name)
            for other in sorted(edges[name]):
                search(other, edges, seen, found)
            found.append(name)
        return found

    seen: set[str] = set()
    finished: list[str] = []
    for name in sorted(graph):
        search(name, graph, seen, finished)
    seen = set()
    components = [set(search(name, reverse, seen, [])) for name in reversed(finished)]
    return [component for component in components if len(component) > 1]


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def test_every_module_imports_only_what_its_layer_may() -> None:
    broken = []
    seen = set()
    for name, tree in modules():
        layer = max((layer for layer in ALLOWED if within(name, layer)), key=len, default=None)
        if layer is None:
            assert name == "services", f"{name} belongs to no layer"
            continue
        seen.add(layer)
        for imported in imports(tree):
            top = imported.split(".")[0]
            allowed = any(
                within(imported, entry) or (entry == "STDLIB" and top in STDLIB) for entry in ALLOWED[layer] | {layer}
            )
            if not allowed and imported != "__future__":
                broken.append(f"{name} imports {imported}")
    assert not broken
    assert seen == set(ALLOWED), "a layer without a module: the table is stale"


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": set()}
    assert circles(graph) == [{"a", "b", "c"}]
    assert not circles({**graph, "c": {"d"}})


def test_no_module_imports_itself_in_a_circle() -> None:
    """Imports for types alone count too: who reads one module of a circle has to read all."""
    graph = import_graph((*PACKAGES, "scripts", "tests"))
    assert "services.gateway.actor" in graph["services.gateway.main"]
    assert not [sorted(circle) for circle in circles(graph)]


@pytest.mark.parametrize("house", ["services.gateway", "services.scheduler"])
def test_wings_import_downwards_only(house: str) -> None:
    """What the table allows has no circle either, so that wings cannot grow together module by module."""
    wings = {layer for layer in ALLOWED if within(layer, house)}
    assert not circles({wing: ALLOWED[wing] & wings for wing in wings})
    assert not any(ALLOWED[wing] & {house, f"{house}.http"} for wing in wings)
    folders = {".".join(path.relative_to(ROOT).parent.parts) for path in ROOT.joinpath(*house.split(".")).rglob("*.py")}
    assert folders == wings, "every folder is a wing, with a row of its own"


def test_a_folder_is_seen_at_one_glance() -> None:
    """A dozen modules, or some more where they are variants of one thing, as formats and layers are."""
    paths = [path for package in (*PACKAGES, "scripts", "tests") for path in (ROOT / package).rglob("*")]
    counts = Counter(path.parent for path in paths if path.suffix in (".py", ".h", ".cpp"))
    assert {path.relative_to(ROOT).as_posix(): n for path, n in counts.items() if n > MOST_FILES} == {}


def test_only_those_who_compute_reach_modeling() -> None:
    names = ("weights", "lora", "sampling", "modeling", "execution", "heads", "loading")
    rooms = tuple(f"engine.{name}" for name in names)
    plain = {
        "engine.description.reading",
        "engine.loading.memory",
        "engine.weights.inventory",
        "engine.weights.quantised.form",
        "engine.weights.quantised.kept",
        "engine.weights.quantised.reading",
    }  # figures without torch, for checks before a start
    users = {
        name
        for name, tree in modules()
        for i in imports(tree)
        if any(within(i, room) for room in rooms) and not (i in plain and within(name, "services.cli.checks"))
    }
    assert users
    assert all(any(within(name, user) for user in (*rooms, "services.worker", "services.draft")) for name in users)


def test_the_scheduler_s_core_is_pure() -> None:
    num_checked = 0
    for name, tree in modules():
        if within(name, "services.scheduler") and name.rpartition(".")[2] not in SHELLS:
            num_checked += 1
            broken = [i for i in imports(tree) if i.split(".")[0] in PURE_FORBIDDEN or within(i, "shared.actor")]
            assert not broken, f"{name} imports {broken}"
    assert num_checked > 10


def test_who_uses_a_service_s_core_leaves_its_shell_alone() -> None:
    """The simulator and the benches run the cores of services; sockets and clocks stay with their actors."""
    users = set()
    for name, tree in modules():
        own = ".".join(name.split(".")[:2])
        if not within(name, "services"):
            continue
        for imported in imports(tree):
            parts = imported.split(".")
            if parts[0] == "services" and len(parts) > 2 and not within(imported, own):
                users.add(name)
                assert parts[2] not in SHELLS or parts[1] == "cli", f"{name} imports the shell {imported}"
    assert any(within(name, "services.simulator") for name in users)


def test_nothing_unsafe_is_imported_or_called() -> None:
    for name, tree in modules():
        assert not [i for i in imports(tree) if i.split(".")[0] in UNSAFE], name
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("eval", "exec", "torch.load", "yaml.load", "__import__"), f"{name} calls {called}"
                assert not called.endswith((".recv_pyobj", ".send_pyobj")), f"{name} calls {called}"


def test_checks_before_a_start_never_load_torch() -> None:
    program = "import services.cli.serve, sys; sys.exit(bool({'torch', 'numpy', 'grpc'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("service", NO_TORCH)
def test_services_without_a_model_never_load_torch(service: str) -> None:
    program = f"import services.{service}.main, sys; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_services_start_without_what_colours_tracebacks_and_others_find_it() -> None:
    pytest.importorskip("rich", reason="needs rich, which other packages bring")
    program = "import services.scheduler.main, sys; began = 'rich' in sys.modules; import rich; sys.exit(began)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_transformers_imports_beside_our_kernels_package() -> None:
    """`kernels` is also a package on the index that transformers probes for."""
    program = "import kernels, transformers; from transformers import LlamaConfig; LlamaConfig()"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_no_two_classes_have_one_name() -> None:
    """One name, one meaning: a reader who looks a class up finds one.  Private names belong to their module."""
    places: dict[str, list[str]] = {}
    for name, tree in modules((*PACKAGES, "scripts")):
        for node in tree.body if isinstance(tree, ast.Module) else ():
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(name)
    assert len(places) > 500
    assert not {name: modules for name, modules in places.items() if len(modules) > 1}
