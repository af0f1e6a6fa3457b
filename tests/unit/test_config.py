"""Settings: where they come from, and what is wrong with them in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.config import Settings, load_settings, places, settings_environment
from shared.config.settings import sections
from shared.errors import ConfigError


def test_the_command_line_beats_the_environment_beats_the_file(tmp_path: Path) -> None:
    file = tmp_path / "pageant.toml"
    file.write_text('max_num_seqs = 3\nport = 1\nblock_size = 32\nmodel = "m"\n', encoding="utf-8")
    environ = {"PAGEANT_PORT": "2", "PAGEANT_BLOCK_SIZE": "8", "OTHER": "x", "PAGEANT_ENABLE_PREFIX_CACHING": "false"}
    settings = load_settings({"block_size": 64, "host": None}, file=file, environ=environ)
    assert (settings.scheduling.max_num_seqs, settings.gateway.port) == (3, 2)
    assert (settings.memory.block_size, settings.engine.model) == (64, "m")
    assert settings.memory.enable_prefix_caching is False
    assert settings.gateway.host == Settings().gateway.host


def test_a_child_process_reads_the_same_settings() -> None:
    settings = load_settings({"port": 5, "enable_prefix_caching": False, "model": "x y"}, environ={})
    assert load_settings(environ=settings_environment(settings)) == settings


@pytest.mark.parametrize("later", ['tool_call_parser = "mistral"\n', "no TOML at all"])
def test_a_child_process_reads_no_file_beside_them(tmp_path: Path, later: str) -> None:
    file = tmp_path / "pageant.toml"
    file.write_text('tool_call_parser = "hermes"\n', encoding="utf-8")
    inherited = {"PAGEANT_CONFIG": str(file)}
    settings = load_settings({"tool_call_parser": ""}, environ=inherited)
    assert load_settings(environ=inherited | settings_environment(settings)) == settings
    file.write_text(later, encoding="utf-8")
    assert load_settings(environ=inherited | settings_environment(settings)) == settings


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"block_size": 17}, "block_size"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"max_num_batched_tokens": 10}, "max_num_batched_tokens"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"port": "many"}, "port"),
        ({"dtype": "int3"}, "dtype"),
        ({"num_blocks": -1}, "num_blocks"),
        ({"heartbeat_timeout": 0.1}, "heartbeat"),
        ({"heartbeat_timeout": "nan"}, "heartbeat_timeout"),
        ({"heartbeat_interval": 0}, "heartbeat_interval"),
        ({"heartbeat_interval": "nan"}, "heartbeat_interval"),
        ({"reconcile_interval": -1}, "reconcile_interval"),
        ({"template_timeout": 0}, "template_timeout"),
        ({"resume_timeout": "nan"}, "resume_timeout"),
        ({"max_request_bytes": 0}, "max_request_bytes"),
        ({"max_prompt_bytes": -1}, "max_prompt_bytes"),
        ({"num_tokenizer_threads": 0}, "num_tokenizer_threads"),
    ],
)
def test_what_cannot_work_is_named(overrides: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_settings(overrides, environ={})


def test_sizes_are_written_with_units(tmp_path: Path) -> None:
    (tmp_path / "pageant.toml").write_text('store_memory = "3GiB"\n', encoding="utf-8")
    environ = {"PAGEANT_KV_CACHE_MEMORY": "512 Mi"}
    memory = load_settings({"draft_kv_cache_memory": "64KiB"}, file=tmp_path / "pageant.toml", environ=environ)
    assert (memory.memory.store_memory, memory.memory.kv_cache_memory) == (3 << 30, 512 << 20)
    assert memory.speculation.draft_kv_cache_memory == 64 << 10
    with pytest.raises(ConfigError):
        load_settings({"store_memory": "1 gigabyte"}, environ={})


def test_an_unknown_setting_in_the_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "pageant.toml"
    file.write_text("max_seqs = 3\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="max_seqs"):
        load_settings(file=file, environ={})
    with pytest.raises(ConfigError, match="cannot read"):
        load_settings(file=tmp_path / "absent.toml", environ={})


def test_a_file_in_another_encoding_is_named(tmp_path: Path) -> None:
    file = tmp_path / "pageant.toml"
    file.write_bytes('model = "modèle"\n'.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"cannot read .*pageant\.toml.*utf-8"):
        load_settings(file=file, environ={})


def test_a_name_belongs_to_one_section() -> None:
    names = [field for section in sections().values() for field in section.__struct_fields__]
    assert len(names) == len(set(names)) == len(places()) > 90


def test_sections_are_made_of_flat_names_and_give_them_back() -> None:
    settings = Settings.of(port=5, max_num_seqs="7")
    assert (settings.gateway.port, settings.scheduling.max_num_seqs) == (5, 7)
    assert settings.replace(max_num_seqs=8).flat() == Settings().flat() | {"port": 5, "max_num_seqs": 8}
    with pytest.raises(KeyError, match="max_seqs"):
        Settings.of(max_seqs=1)
