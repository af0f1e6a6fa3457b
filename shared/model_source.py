"""Where a model's files are: a directory as it is, else a snapshot from the Hugging Face hub.  No torch here."""

from __future__ import annotations

from pathlib import Path

from shared.errors import ModelError

PATTERNS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "model*.safetensors",
    "model.safetensors.index.json",
)


def resolve_model_dir(model: str) -> Path:
    """The directory with `model`'s files.  Raises ModelError where there is none and no hub gives one.

    Only configuration, tokenizer and safetensors files are taken: nothing that could run.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ModelError(f"model {model!r} is a file; give the directory that holds it")
    if path.is_absolute() or model.count("/") > 1 or model.startswith("."):
        raise ModelError(f"model directory {model!r} does not exist")
    return _download(model)


def _download(repository: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelError(f"model {repository!r} is no directory, and huggingface_hub is not installed") from error
    try:
        return Path(snapshot_download(repository, allow_patterns=list(PATTERNS)))
    except Exception as error:  # the hub's client raises its own, requests', httpx's and OSErrors alike
        raise ModelError(f"model {repository!r} is no directory and cannot be downloaded: {error}") from error
