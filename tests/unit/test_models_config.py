"""Models in a configuration file: which is the first, what each inherits, and what is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.config import load_configuration, load_settings, read_models, settings_of_model, write_models
from shared.errors import ConfigError

TWO = """
num_threads = 2
tool_call_parser = "hermes"
[models.big]
model = "models/big"
workers = 3
[models.small]
model = "models/small"
aliases = ["tiny", "little"]
max_num_seqs = 4
pinned = true
"""


def written(directory: Path, text: str) -> Path:
    file = directory / "pageant.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_the_first_table_is_the_first_model_unless_one_is_named(tmp_path: Path) -> None:
    file = written(tmp_path, TWO)
    found = load_configuration(file=file, environ={})
    assert (found.settings.engine.model, found.settings.engine.model_name, found.workers) == ("models/big", "big", 3)
    assert [model.names for model in found.models] == [("small", "tiny", "little")]
    named = load_configuration({"model": "models/other"}, file=file, environ={})
    assert named.settings.engine.model_name == "other" and named.workers is None
    assert [model.name for model in named.models] == ["big", "small"]
    assert load_settings(file=file, environ={}).engine.num_threads == 2, "a service reads past the tables"


def test_a_model_has_its_own_settings_and_the_deployment_s(tmp_path: Path) -> None:
    found = load_configuration(file=written(tmp_path, TWO), environ={})
    own = settings_of_model(found.settings, found.models[0])
    assert own.engine.model_names == ("small", "tiny", "little") and own.scheduling.max_num_seqs == 4
    assert own.models.pinned and not found.settings.models.pinned
    assert own.engine.num_threads == 2 and own.gateway.tool_call_parser == "", "a parser is of one checkpoint"
    assert own.deployment.runtime_path.parent == found.settings.deployment.runtime_path
    write_models(tmp_path / "list", found.models)
    assert read_models(tmp_path / "list") == found.models and read_models(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ('[models.x]\nmodel = "m"\naliases = ["big"]', "the name 'big' of model 'x' is taken by the first model"),
        ('[models.x]\nmodel = "m"\naliases = ["tiny"]', "the name 'tiny' of model 'x' is taken by model 'small'"),
        ('[models.x]\nmodel = "m"\nport = 1', "models.x: port is a setting of the whole deployment"),
        ('[models.x]\nmodel = "m"\nsped = 1', "models.x: sped is no setting"),
        ("[models.x]\nworkers = 1", "models.x: .*missing required field `model`"),
        ('[models.x]\nmodel = "m"\nworkers = 0', "models.x: workers must be in 1..64, got 0"),
        ('[models.x]\nmodel = "m"\nmax_n = 0', "model 'x': max_n must be at least 1, got 0"),
        ('[models."a,b"]\nmodel = "m"', "no comma, got 'a,b'"),
        ("[models]\nx = 1", "models: each must be a table"),
    ],
)
def test_what_cannot_be_is_named(tmp_path: Path, table: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        load_configuration(file=written(tmp_path, f"{TWO}\n{table}"), environ={})
    assert "\n" not in str(error.value)
