"""settings.md: every setting with its type, default, option, environment variable and sentence, by topic."""

from __future__ import annotations

from scripts.documents.reference.markdown import code, page, section, table
from scripts.documents.reference.source import type_text
from shared.config.catalogue import Setting, catalogue, shown

TEXT = """\
Four sources, each of which overrides the one before it: the defaults, a file `pageant.toml` (named by `PAGEANT_CONFIG`
or `--config`), environment variables, the command line. The environment variable of a setting is `PAGEANT_` and its
name in capitals. So `max_num_seqs` is `max_num_seqs = 64` in the file, `PAGEANT_MAX_NUM_SEQS=64` in the environment,
and `--max-num-seqs 64` on the command line. Sizes are bytes, times are seconds, lengths are tokens.

`pageant serve -h` shows the settings that are marked • here; `--help` shows all."""
MARK = " •"
HEAD = ("setting", "type", "default", "environment", "option", "meaning")


def render() -> str:
    settings = catalogue()
    topics = dict.fromkeys(setting.topic for setting in settings)
    parts = [section(topic, table(HEAD, (_row(one) for one in settings if one.topic == topic))) for topic in topics]
    return page("Settings", "shared/config", TEXT, *parts)


def _row(one: Setting) -> tuple[str, ...]:
    default = code(shown(one.default)) if one.default != "" else "empty"
    name = f"{code(one.name)}{MARK if one.is_common else ''}"
    return (name, type_text(one.kind), default, code(f"PAGEANT_{one.name.upper()}"), code(option(one)), one.sentence)


def option(one: Setting) -> str:
    flag = f"--{one.name.replace('_', '-')}"
    return f"{flag}, --no-{flag[2:]}" if one.kind is bool else flag
