"""A model's files: are they there, whole, and of a kind that is served?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from engine.description.reading import read_config
from engine.description.spec import ModelSpec
from services.cli.checks.finding import Finding
from services.cli.checks.tensor_files import TensorFiles, read_tensor_files
from shared.config import EngineSettings, SpeculationSettings
from shared.errors import ModelError
from shared.model_source import ask_hub, find_model_dir, find_snapshot, suggestion, why_no_directory

OTHER_FORMATS = {"*.gguf": "GGUF files", "*.bin": "PyTorch files (*.bin)", "*.pth": "PyTorch files (*.pth)"}


class CheckpointFacts(msgspec.Struct, frozen=True):
    """What a model's files say without being loaded."""

    directory: Path
    spec: ModelSpec
    tensors: TensorFiles | None  # None: weights are made up


def check_model(settings: EngineSettings) -> tuple[list[Finding], CheckpointFacts | None]:
    """The settings' model; no checkpoint where it must be downloaded first, or something is wrong."""
    return _check(settings.model, "model", settings.load_format)


def check_draft(
    engine: EngineSettings, speculation: SpeculationSettings
) -> tuple[list[Finding], CheckpointFacts | None]:
    if speculation.draft == "off":
        return [], None
    if speculation.draft == "ngram":
        return [Finding("ok", "draft", "prompt lookup")], None
    return _check(speculation.draft, "draft", engine.load_format)


def _check(name: str, subject: str, load_format: str) -> tuple[list[Finding], CheckpointFacts | None]:
    directory = find_model_dir(name)
    if directory is None:
        if (wrong := why_no_directory(name)) is not None:
            return [Finding("wrong", subject, _about(subject, wrong))], None
        directory = find_snapshot(name)
    if directory is None:
        return [_ask_hub(name, subject)], None
    try:
        checkpoint = read_checkpoint(directory, load_format)
    except ModelError as error:
        return [Finding("wrong", subject, str(error))], None
    architecture = checkpoint.spec.architecture
    size = f", {checkpoint.tensors.num_bytes / 1e6:.1f} MB of weights" if checkpoint.tensors else ", random weights"
    return [Finding("ok", subject, f"{directory}: {architecture}{size}")], checkpoint


def _about(subject: str, text: str) -> str:
    """Words about a model, said of a draft."""
    return text if subject == "model" else text.replace("model", subject, 1)


def _ask_hub(name: str, subject: str) -> Finding:
    standing = ask_hub(name)
    if standing == "there":
        return Finding("note", subject, f"{name} will be downloaded from the Hugging Face hub")
    hint = suggestion(name)
    if standing == "absent":
        return Finding(
            "wrong",
            subject,
            f"{subject} {name!r} is neither a directory nor a repository of the Hugging Face hub{hint}",
        )
    return Finding(
        "wrong",
        subject,
        f"{subject} {name!r} is not a directory{hint or '.'} If it is a repository of the Hugging Face hub: the hub "
        "cannot be reached from here",
    )


def read_checkpoint(directory: Path, load_format: str) -> CheckpointFacts:
    """Raises ModelError where a file is absent, not whole, or of a kind that is not served."""
    absent = list(_absent(directory, load_format))
    if absent:
        raise ModelError(f"{directory} lacks {', '.join(absent)}{_instead(directory)}")
    spec = read_config(directory)
    return CheckpointFacts(directory, spec, None if load_format == "dummy" else read_tensor_files(directory))


def _absent(directory: Path, load_format: str) -> Iterator[str]:
    yield from (name for name in ("config.json", "tokenizer.json") if not (directory / name).is_file())
    if load_format != "dummy" and not any(directory.glob("*.safetensors")):
        yield "*.safetensors"


def _instead(directory: Path) -> str:
    """What the directory has in place of a checkpoint that is served."""
    for pattern, words in OTHER_FORMATS.items():
        if any(directory.glob(pattern)):
            return f"; it has {words}, which are not served: convert them to safetensors"
    return ""
