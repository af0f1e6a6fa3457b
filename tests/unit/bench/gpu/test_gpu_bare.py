"""The GPU's bench on a machine that has nothing but torch, triton and the few wheels of the messages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]
BARE = """
import sys
from importlib.machinery import PathFinder

WHEELS = {"torch", "torchgen", "functorch", "triton", "numpy", "zmq", "msgspec", "structlog"}
NEEDED_BY_TORCH = {"typing_extensions", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec", "filelock"}
OURS = {"engine", "kernels", "protos", "scripts", "services", "shared", "tests"}
KNOWN = WHEELS | NEEDED_BY_TORCH | OURS | set(sys.stdlib_module_names)


class Bare:
    find_distributions = PathFinder.find_distributions

    @staticmethod
    def find_spec(name, path=None, target=None):
        known = name.partition(".")[0] in KNOWN or name.startswith("_sysconfigdata")
        return PathFinder.find_spec(name, path, target) if known else None


sys.meta_path = [Bare if finder is PathFinder else finder for finder in sys.meta_path]
"""


def run_bare(folder: Path, *arguments: str) -> str:
    """What Python prints, where most packages are not to be found."""
    (folder / "sitecustomize.py").write_text(BARE, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(folder)}, capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_environment_is_bare(tmp_path: Path) -> None:
    names = "grpc safetensors tqdm tokenizers pytest click"
    program = f"from importlib.util import find_spec; print([name for name in {names.split()} if find_spec(name)])"
    assert run_bare(tmp_path, "-c", program).strip() == "[]"


def test_every_part_of_the_table_runs_or_says_what_it_lacks(tmp_path: Path) -> None:
    told = run_bare(tmp_path, "-m", "tests.unit.bench.gpu.gpu_parts")
    assert "a load offline, a soak of" in told
