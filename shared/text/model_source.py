"""Where a model's files are: a directory as it is, else a snapshot from the Hugging Face hub.  No torch here."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Literal

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
BUNDLED = Path(__file__).resolve().parents[2] / "models"  # of a checkout; a wheel has none
HUB_SECONDS = 5.0  # for one question to the hub
ALIKE = 0.75  # of a name that is suggested for another

Standing = Literal["there", "absent", "unreachable"]


def resolve_model_dir(model: str) -> Path:
    """The directory with `model`'s files.  Raises ModelError where neither a directory nor the hub has them.

    Only configuration, tokenizer and safetensors files are taken: nothing that could run.
    """
    if (found := find_model_dir(model)) is not None:
        return found
    if (wrong := why_no_directory(model)) is not None:
        raise ModelError(wrong)
    return _download(model)


def find_model_dir(model: str) -> Path | None:
    """A directory of this machine; a bundled model is found from any working directory."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    bundled = BUNDLED.parent / path
    if path.parts[:1] == (BUNDLED.name,) and len(path.parts) > 1 and bundled.is_dir():
        return bundled
    return None


def why_no_directory(model: str) -> str | None:
    """What is wrong with a name that is neither a directory nor could be a repository of the hub."""
    path = Path(model).expanduser()
    if path.suffix.lower() == ".gguf":
        return f"model {model!r} is a GGUF file; give a directory with config.json, tokenizer.json and *.safetensors"
    if path.exists():
        return f"model {model!r} is a file; give the directory that holds it"
    if path.is_absolute() or model.count("/") != 1 or model.startswith((".", "~", f"{BUNDLED.name}/")):
        return f"model directory {model!r} does not exist{suggestion(model)}"
    return None


def suggestion(model: str) -> str:
    """`; did you mean ...?`, where a directory with a model has a similar name."""
    path = Path(model).expanduser()
    folders = (path.parent, Path(), Path(BUNDLED.name), BUNDLED)
    known = {str(found.parent) for folder in folders for found in folder.glob("*/config.json")}
    known |= {str(Path(name).relative_to(BUNDLED.parent)) for name in known if name.startswith(str(BUNDLED))}
    close = get_close_matches(str(path), sorted(known), n=1, cutoff=ALIKE)
    return f"; did you mean {close[0]!r}?" if close else ""


def find_snapshot(repository: str) -> Path | None:
    """What an earlier download of a repository left in the hub's cache.  Asks no network."""
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(repository, allow_patterns=list(PATTERNS), local_files_only=True))
    except Exception:  # the hub's client raises its own and others' errors alike
        return None


def ask_hub(repository: str) -> Standing:
    """Whether the hub has a repository, as far as it can be asked."""
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
    except ImportError:
        return "unreachable"
    try:
        HfApi().model_info(repository, timeout=HUB_SECONDS)
    except (RepositoryNotFoundError, HFValidationError):
        return "absent"
    except Exception:  # a network's, a proxy's, a server's
        return "unreachable"
    return "there"


def _download(repository: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelError(f"model {repository!r} is not a directory, and huggingface_hub is not installed") from error
    try:
        return Path(snapshot_download(repository, allow_patterns=list(PATTERNS)))
    except Exception as error:  # the hub's client raises its own, requests', httpx's and OSErrors alike
        raise ModelError(
            f"model {repository!r} is not a directory{suggestion(repository)} and cannot be downloaded: {error}"
        ) from error
