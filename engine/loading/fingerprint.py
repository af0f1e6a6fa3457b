"""A worker's fingerprint: everything that can change a bit of its results, in parts.

Numeric classes follow from tests.  Native kernels of one source agree bit for bit on all processors of a class:
`tests/kernels/cpu/test_numeric_classes.py`.  Torch's libraries choose their code by processor, so there each model of
processor or GPU is a class of its own.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from engine.description.spec import ModelSpec
from engine.loading.backend import Backend, usable_cores
from engine.loading.torch_ranks import class_of_ranks
from engine.weights.digest import DigestMemory, WeightDigest, identity_of
from engine.weights.formats import Formats, name_of
from engine.weights.quantised.form import Quantisation
from engine.weights.source import WeightSource
from kernels.cpu.binding import build
from kernels.cpu.binding.loading import load_compiled
from kernels.cpu.binding.native import Native
from kernels.ops import digest
from shared.config import Settings
from shared.messages.fingerprint import Fingerprint
from shared.text.text_digest import digest_of, text_fingerprint
from shared.version import VERSION

MADE_UP = "dummy"  # random weights: the configuration determines them
MOST_THREADS = 4  # of a digest in numpy's way


class DigestedSource:
    """A checkpoint that is being loaded, on its way to a digest; one that was digested before is not read twice."""

    def __init__(self, source: WeightSource, native: Native | None, memory: DigestMemory) -> None:
        self._files: Sequence[Path] = source.files
        self._memory = memory
        self._identity = identity_of(self._files)
        self._known = memory.recall(self._identity) if self._files else MADE_UP
        self._digest: WeightDigest | None = None
        self._lent: Native | None = None
        if not self._known:
            self._digest = make_digest(native or self._borrow())
            source.watch(self._digest)

    def _borrow(self) -> Native | None:
        """The native library for a worker that computes otherwise; as many threads of it as torch has."""
        native = load_compiled()
        if native is not None and native.num_threads == 1:
            self._lent = native
            native.set_threads(torch.get_num_threads(), pin=False)
        return native

    @property
    def is_reading(self) -> bool:
        """Whether it sees what is taken: all tensors must be, then."""
        return self._digest is not None

    def value(self) -> str:
        """Once all tensors were taken."""
        if self._digest is None:
            return self._known
        found = self._digest.value
        if self._lent is not None:
            self._lent.set_threads(1, pin=False)
        if identity_of(self._files) == self._identity:  # else the files were changed meanwhile
            self._memory.remember(self._identity, found)
        return found


def make_digest(native: Native | None) -> WeightDigest:
    """Of the native library where there is one, also for workers that compute otherwise; else of numpy, in threads."""
    if native is not None:
        return WeightDigest(native.row_sums, copy=native.copy)
    return WeightDigest(digest.row_sums, threads=min(MOST_THREADS, usable_cores()))


def remembered_digest(source: WeightSource, memory: DigestMemory) -> str:
    """Without reading a weight; empty where no worker has loaded them yet."""
    return memory.recall(identity_of(source.files)) if source.files else MADE_UP


def make_fingerprint(
    settings: Settings,
    directory: Path,
    spec: ModelSpec,
    quantisation: Quantisation | None,  # what the stored tensors mean depends on it
    backend: Backend,
    weights: str,
) -> Fingerprint:
    engine, memory = settings.engine, settings.memory
    described = repr(spec) if quantisation is None else f"{spec!r} {quantisation!r}"
    return msgspec.structs.replace(
        text_fingerprint(directory),
        load_format=MADE_UP if engine.load_format == "dummy" else "safetensors",
        weights=weights,
        config=digest_of(described.encode()),
        executor=_executor(backend),
        numeric_class=_numeric_class(backend) + class_of_ranks(engine, backend, spec),
        dtype=name_of(backend.formats.compute),
        quantization=backend.formats.quantization,
        kv_cache_dtype=name_of(backend.formats.kv),
        batch_invariant="" if backend.native is not None else str(engine.batch_invariant).lower(),
        block_size="" if backend.native is not None else str(memory.block_size),
    )


def _executor(backend: Backend) -> str:
    if backend.native is not None:
        return f"native {build.source_digest()}"
    return f"torch {torch.__version__}, pageant {VERSION}"


def _numeric_class(backend: Backend) -> str:
    if backend.native is not None:
        return native_class(backend.native.target, backend.formats)
    split = f", split {backend.kernels.split}" if backend.kernels.split else ""
    if backend.device.type == "cpu":
        capability = torch.backends.cpu.get_cpu_capability()
        return f"{backend.kernels.name} {capability} on {processor()}, {torch.get_num_threads()} threads"
    return f"{backend.kernels.name} on {torch.cuda.get_device_name(backend.device)}{split}"


def native_class(target: str, formats: Formats) -> str:
    """AVX2 and AVX-512 sum in vectors of another length; products of bfloat16 are rounded as the processor does it.

    A quantised model's attention has such products too, where the processor has them.
    """
    return target if formats.rounds or formats.rounds_attention else target.partition("+")[0]


def processor() -> str:
    try:
        lines = build.CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())
