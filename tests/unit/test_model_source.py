"""Where a model's files are found, from whatever directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.errors import ModelError
from shared.text.model_source import BUNDLED, find_model_dir, resolve_model_dir, suggestion


@pytest.mark.parametrize("name", ["models/pageant-stories", "models/pageant-stories-draft"])
def test_a_bundled_model_is_found_from_any_directory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_model_dir(name) == BUNDLED.parent / name
    (tmp_path / name).mkdir(parents=True)
    assert resolve_model_dir(name) == Path(name), "one's own comes first"


@pytest.mark.parametrize("name", ["models/none", "/none", "./none", "none", "a/b/c", "models", "file.gguf"])
def test_what_is_no_directory_and_no_repository_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").touch()
    with pytest.raises(ModelError, match=name):
        resolve_model_dir(name)
    assert find_model_dir(name) is None


def test_a_similar_name_is_suggested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert suggestion("model/pageant-storie") == "; did you mean 'models/pageant-stories'?"
    assert suggestion("org/quite-another") == ""
    (tmp_path / "llama-8b").mkdir()
    (tmp_path / "llama-8b" / "config.json").touch()
    assert suggestion("lama-8b") == "; did you mean 'llama-8b'?"
    assert suggestion(str(tmp_path / "llama-8")) == f"; did you mean '{tmp_path / 'llama-8b'}'?"
