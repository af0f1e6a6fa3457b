"""A model: whether its files are there, whole and of a kind that is served, and whether it fits into memory.

Memory is checked on a CPU only, and by the least that a model takes: the worker plans to the byte when it has chosen
its formats; here only what no choice could mend is refused.  A GPU's memory is not known without its driver.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Set
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import msgspec

from engine.description.names import Part, Parts, Shape
from engine.description.reading import read_config, why_no_draft
from engine.description.spec import ModelSpec
from engine.loading.memory import GIB, available_memory, block_bytes, plan_memory
from engine.weights.inventory import Inventory, QuantisedMatrix, StoredTensor, take_inventory
from engine.weights.quantised.form import WIDTHS, Quantisation
from engine.weights.quantised.kept import (
    QuantisedAs,
    decoded_bytes,
    decoded_slots,
    gpu_bytes,
    gpu_weights,
    kept_slots,
    packed_bytes,
)
from engine.weights.quantised.reading import read_quantisation
from shared.config import EngineSettings, MemorySettings, Settings
from shared.errors import ConfigError, ModelError
from shared.text.model_source import ask_hub, find_model_dir, find_snapshot, suggestion, why_no_directory

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
LISTED = 4  # kinds of modules in one line
LENGTH_BYTES = 8
MAX_HEADER = 100 << 20  # the format's own limit
LFS_POINTER = b"version https://git-lfs"
OTHER_FORMATS = {"*.gguf": "GGUF files", "*.bin": "PyTorch files (*.bin)", "*.pth": "PyTorch files (*.pth)"}
GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
LEAST_WEIGHT = {"auto": 2, "none": 2, "int8": 1, "int4": 0.5, "fp8": 1}  # bytes of a number
LEAST_HEAD_WEIGHT = 1  # bytes of a number of a draft head
# Bytes of a number of a KV cache.
LEAST_KV = {"auto": 2, "bfloat16": 2, "float32": 4} | dict.fromkeys(("int8", "fp8", "fp8_e4m3", "fp8_e5m2"), 1)


class Finding(msgspec.Struct, frozen=True):
    """`wrong` keeps this machine from serving; a `note` does not."""

    verdict: Literal["ok", "note", "wrong"]
    subject: str
    text: str


class KeptMatrices(msgspec.Struct, frozen=True):
    """Those of a checkpoint that stay codes in memory, as they are joined: multiplied so, or decoded meanwhile; with
    their bytes."""

    multiplied: list[tuple[Parts, int]] = []
    decoded: list[tuple[Parts, int]] = []
    kernels: str = "native"  # that compute with them

    @property
    def sizes(self) -> list[int]:
        """Bytes of both."""
        return [sum(size for _, size in slots) for slots in (self.multiplied, self.decoded)]


class CheckpointFacts(msgspec.Struct, frozen=True):
    """What a model's files say without being loaded; without bytes where weights are made up."""

    spec: ModelSpec
    num_bytes: int
    num_elements: int
    quantised: str = ""  # how, for a user; empty: not at all
    kept_bytes: int = 0  # of what stays codes in memory,
    kept_elements: int = 0  # and the numbers that it stands for


class HeaderEntry(msgspec.Struct, frozen=True):
    """What the header of a file says of one tensor."""

    dtype: str
    shape: Shape
    data_offsets: tuple[int, int]


def check_model(name: str, subject: str, settings: EngineSettings) -> tuple[Finding, CheckpointFacts | None]:
    """A model or a draft; no facts where it must be downloaded first, or something is wrong."""
    directory = find_model_dir(name)
    if directory is None:
        if (wrong := why_no_directory(name)) is not None:
            return Finding("wrong", subject, wrong if subject == "model" else wrong.replace("model", subject, 1)), None
        directory = find_snapshot(name)
    if directory is None:
        return _ask_hub(name, subject), None
    try:
        facts = read_checkpoint(directory, settings)
    except ModelError as error:
        return Finding("wrong", subject, str(error)), None
    size = f"{facts.num_bytes / 1e6:.1f} MB of weights" if facts.num_bytes else "random weights"
    quantised = f"; {facts.quantised}" if facts.quantised else ""
    return Finding("ok", subject, f"{directory}: {facts.spec.architecture}, {size}{quantised}"), facts


def _ask_hub(name: str, subject: str) -> Finding:
    standing, hint = ask_hub(name), suggestion(name)
    if standing == "there":
        return Finding("note", subject, f"{name} will be downloaded from the Hugging Face hub")
    text = f"is neither a directory nor a repository of the Hugging Face hub{hint}"
    if standing != "absent":
        text = (
            f"is not a directory{hint or '.'} If it is a repository of the Hugging Face hub: the hub cannot be reached"
        )
    return Finding("wrong", subject, f"{subject} {name!r} {text}")


def read_checkpoint(directory: Path, settings: EngineSettings) -> CheckpointFacts:
    """Raises ModelError where a file is absent, not whole, or of a kind that is not served."""
    absent = [name for name in ("config.json", "tokenizer.json") if not (directory / name).is_file()]
    if settings.load_format != "dummy" and not any(directory.glob("*.safetensors")):
        absent.append("*.safetensors")
    if absent:
        others = (words for pattern, words in OTHER_FORMATS.items() if any(directory.glob(pattern)))
        there = next((f"; it has {words}, which are not served: convert them to safetensors" for words in others), "")
        raise ModelError(f"{directory} lacks {', '.join(absent)}{there}")
    spec = read_config(directory)
    if settings.load_format == "dummy":
        return CheckpointFacts(spec, 0, 0)
    quantisation = read_quantisation(directory)
    headers = [(path, _read_header(path)) for path in _tensor_files(directory)]
    entries = [entry for _, header in headers for entry in header.values()]
    num_bytes = sum(entry.data_offsets[1] - entry.data_offsets[0] for entry in entries)
    if quantisation is None:
        return CheckpointFacts(spec, num_bytes, sum(math.prod(entry.shape) for entry in entries))
    found = {
        name: StoredTensor(entry.dtype, entry.shape, path) for path, header in headers for name, entry in header.items()
    }
    inventory = take_inventory(directory, spec, quantisation, found)
    kept = kept_matrices(settings, spec, inventory)
    return CheckpointFacts(
        spec,
        num_bytes,
        inventory.num_elements,
        describe(quantisation, inventory, found, kept),
        sum(kept.sizes),
        sum(math.prod(part.wanted) for parts, _ in (*kept.multiplied, *kept.decoded) for part in parts),
    )


def kept_matrices(settings: EngineSettings, spec: ModelSpec, inventory: Inventory) -> KeptMatrices:
    """What native kernels, or Triton's on a GPU, leave as it is stored where they are there."""

    def quantised_as(part: Part) -> QuantisedMatrix | None:
        return inventory.quantised.get(part.name)

    if on_gpu(settings):
        return _kept_on_gpu(settings, spec, inventory, quantised_as)
    if settings.kernels == "torch":
        return KeptMatrices()
    by_itself = settings.quantization == "auto" and settings.dtype in ("auto", "bfloat16")
    multiplied: list[tuple[Parts, int]] = []
    decoded: list[tuple[Parts, int]] = []
    if by_itself or settings.quantization == "int4":
        slots = kept_slots(spec, inventory.tensors, quantised_as)
        multiplied = [(parts, packed_bytes(parts, form)) for parts, form in slots]
    if settings.quantization in ("auto", "none") and settings.dtype != "float16":
        left = {parts for parts, _ in multiplied}
        slots = [one for one in decoded_slots(spec, inventory.tensors, quantised_as) if one[0] not in left]
        decoded = [(parts, decoded_bytes(parts, form)) for parts, form in slots]
    return KeptMatrices(multiplied, decoded)


def _kept_on_gpu(
    settings: EngineSettings, spec: ModelSpec, inventory: Inventory, quantised_as: QuantisedAs
) -> KeptMatrices:
    """Under int4 codes of 4 bits; under fp8 those of experts: linears that meet activations in E4M3 are not counted."""
    if settings.quantization == "int8" or find_spec("triton") is None:
        return KeptMatrices()
    found = gpu_weights(spec, inventory.tensors, quantised_as)
    if settings.quantization == "int4":
        found = [(weights, form) for weights, form in found if form.bits == 4]
    if settings.quantization == "fp8":
        found = [(weights, form) for weights, form in found if len(weights) > 1]
    sizes = [(sum(weights, ()), gpu_bytes(weights, form)) for weights, form in found]
    return KeptMatrices(decoded=sizes, kernels="Triton's")


def describe(
    quantisation: Quantisation,
    inventory: Inventory,
    found: Mapping[str, StoredTensor],
    kept: KeptMatrices,
) -> str:
    """Formats with their matrices and bytes, what is left as it is, and what computes them."""
    matrices = {name for name, shape in inventory.tensors.shapes().items() if len(shape) >= 2}
    schemes: dict[str, list[int]] = {}
    for one in inventory.quantised.values():
        tensors = [found[name] for name in one.names]
        size = sum(math.prod(tensor.shape) * WIDTHS[tensor.dtype] for tensor in tensors)
        schemes.setdefault(one.form.label, []).append(size)
    parts = ", ".join(
        f"{len(sizes)} of {len(matrices)} matrices in {label} ({sum(sizes) / 1e6:.1f} MB)"
        for label, sizes in schemes.items()
    )
    left = _listed({name.removesuffix(".weight") for name in matrices - inventory.quantised.keys()})
    multiplied, decoded = (
        {part.name for parts, _ in slots for part in parts} for slots in (kept.multiplied, kept.decoded)
    )
    computed, uses = [], ("multiply (W4A8, W8A8)", "decode while they multiply")
    for names, size, use in zip((multiplied, decoded), kept.sizes, uses, strict=True):
        if names:
            computed.append(f"{len(names)} stay codes ({size / 1e6:.1f} MB), which {kept.kernels} kernels {use}")
    if others := inventory.quantised.keys() - multiplied - decoded:
        computed.append(f"{f'{len(others)} are ' if computed else ''}dequantised at load")
    if quantisation.rounds_activations and inventory.quantised.keys() - multiplied:
        computed.append("activations stay in 16 or 32 bits" + (" there" if multiplied else ""))
    return "; ".join((f"{quantisation.method}: {parts}", *([f"not quantised: {left}"] if left else []), *computed))


def _listed(modules: Set[str]) -> str:
    """Kinds of modules, without the numbers of layers and experts."""
    kinds = sorted({re.sub(r"\.\d+(?=\.)", ".*", module) for module in modules})
    return ", ".join(kinds[:LISTED]) + (f" and {len(kinds) - LISTED} more" if len(kinds) > LISTED else "")


def read_headers(directory: Path) -> dict[str, HeaderEntry]:
    """Of all tensors, by name.  Raises ModelError where a file is absent, or not whole."""
    if not any(directory.glob("*.safetensors")):
        raise ModelError(f"{directory} has no *.safetensors")
    return {name: entry for path in _tensor_files(directory) for name, entry in _read_header(path).items()}


def _tensor_files(directory: Path) -> list[Path]:
    """The files that the index names, or the only one.  Raises ModelError where one is absent."""
    index = directory / INDEX_FILE
    if not index.is_file():
        single = directory / SINGLE_FILE
        return [single if single.is_file() else next(directory.glob("*.safetensors"))]
    try:
        names = sorted(set(msgspec.json.decode(index.read_bytes(), type=dict[str, Any])["weight_map"].values()))
    except (OSError, msgspec.DecodeError, LookupError, AttributeError) as error:
        raise ModelError(f"cannot read {index}: {error}") from error
    if missing := [name for name in names if not (directory / name).is_file()]:
        raise ModelError(f"{directory} lacks {', '.join(missing[:3])}{' ...' if missing[3:] else ''} of {len(names)}")
    return [directory / name for name in names]


def _read_header(path: Path) -> dict[str, HeaderEntry]:
    """By name.

    A file is the length of its header in eight bytes, the header as JSON ({name: {"dtype", "shape", "data_offsets"}}),
    and the data.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(len(LFS_POINTER))
            if start == LFS_POINTER:
                raise ModelError(f"{path} is a pointer of Git LFS, not the file: run `git lfs pull` there")
            length = int.from_bytes(start[:LENGTH_BYTES], "little")
            if length > min(size - LENGTH_BYTES, MAX_HEADER):
                raise ModelError(f"{path} is no safetensors file, or not whole")
            file.seek(LENGTH_BYTES)
            header = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(entry, type=HeaderEntry) for name, entry in header.items()}
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    end = LENGTH_BYTES + length + max((entry.data_offsets[1] for entry in entries.values()), default=0)
    if end > size:
        raise ModelError(f"{path} is not whole: it has {size} bytes of {end}; download it again")
    return entries


def check_memory(
    settings: Settings, facts: CheckpointFacts, *, workers: int, head: CheckpointFacts | None = None
) -> Iterator[Finding]:
    """What the workers' model and KV cache take together, against what is free now; `head`: the draft head's part."""
    spec, memory, free = facts.spec, settings.memory, available_memory()
    if settings.scheduling.max_model_len > spec.longest_model_len:
        positions = f"more than the model's {spec.longest_model_len} positions"
        yield Finding("wrong", "memory", f"max_model_len is {settings.scheduling.max_model_len}, {positions}")
        return
    if on_gpu(settings.engine):
        return
    layer_bytes, head_bytes = _layer_bytes(memory, spec), sum(_layer_bytes(memory, head.spec)) if head else 0
    state_bytes = spec.state_bytes(2)
    kv_bytes = memory.num_blocks * (sum(layer_bytes) + head_bytes) or memory.kv_cache_memory
    if kv_bytes:  # does one sequence fit?
        longest = settings.scheduling.max_model_len or spec.max_position_embeddings
        first, sliding = block_bytes(spec, layer_bytes, spec.windows(longest))
        try:
            plan = plan_memory(
                memory,
                settings.scheduling,
                bytes_per_block=first + head_bytes,
                budget=memory.kv_cache_memory,
                max_model_len=longest,
                sliding=sliding,
                bytes_per_state=state_bytes,
            )
            kv_bytes = plan.num_bytes if memory.num_blocks else kv_bytes
        except ConfigError as error:
            yield Finding("wrong", "memory", str(error))
    others = facts.num_elements - facts.kept_elements
    least_weights = facts.kept_bytes + int(LEAST_WEIGHT[settings.engine.quantization] * others)
    if not facts.quantised:  # else what is dequantised takes more than its files
        least_weights = min(facts.num_bytes, least_weights)
    least_weights += LEAST_HEAD_WEIGHT * head.num_elements if head else 0
    needed = workers * (kv_bytes + least_weights)
    if needed > free:
        each = f"{workers} workers need" if workers > 1 else "the worker needs"
        remedy = "lower kv_cache_memory" if memory.kv_cache_memory else "use a smaller model, or quantization=int4"
        yield Finding(
            "wrong",
            "memory",
            f"{each} at least {needed / GIB:.1f} GiB, {workers * kv_bytes / GIB:.1f} of them KV cache, but "
            f"{free / GIB:.1f} GiB are free; {'lower num_blocks' if memory.num_blocks else remedy}",
        )


def _layer_bytes(memory: MemorySettings, spec: ModelSpec) -> list[int]:
    """Of a block, in each layer that has a cache; the least."""
    per_token = (one.cached_vectors * one.head_dim for one in spec.attentions)
    return [int(count * LEAST_KV[memory.kv_cache_dtype] * memory.block_size) for count in per_token]


def check_draft_model(settings: Settings, facts: CheckpointFacts) -> Iterator[Finding]:
    """Whether it can be a draft's, and its KV cache."""
    if facts.spec.has_states:
        yield Finding("wrong", "draft", why_no_draft(settings.speculation.draft))
    needed, free = settings.speculation.draft_kv_cache_memory, available_memory()
    if not on_gpu(settings.engine) and needed > free:
        text = f"draft_kv_cache_memory is {needed / GIB:.1f} GiB, but {free / GIB:.1f} GiB are free"
        yield Finding("wrong", "draft", text)


def on_gpu(settings: EngineSettings) -> bool:
    """Whether the model may run on a GPU, as far as can be seen without its driver."""
    device = settings.device
    return device == "cuda" or (device == "auto" and any(Path(path).exists() for path in GPU_DEVICES))
