"""The documents name only what there is: programs, options, settings, files, links; and something runs each command."""

from __future__ import annotations

import os
import re
from pathlib import Path

import click
import msgspec
import pytest

from services.cli.main import main
from shared.config import places
from tests.unit.docs.reading import DOCUMENTS, ROOT, Command, commands, is_command, links, name_of, paths
from tests.unit.docs.table import TABLE, Needs, RunBy, how

COMMANDS = commands()
SERVICES = re.findall(r"^  ([a-z]+):$", (ROOT / "compose.yaml").read_text(encoding="utf-8"), re.M)
COMPOSE = {"up", "down", "build", "logs", "ps", "pull", "exec", "stop", "start", "restart", "config"}
CURL = {"-N", "-d", "-H", "-s", "-X"}
MAX_README = 7000  # bytes
MADE = ("models/S", "models/M")  # by a bench, in a folder of the reader's own
OF_TOOLS = {"scripts/test": "pytest", "scripts/quickstart": "pageant"}


def ids(command: Command) -> str:
    return str(command)[:100]


def test_the_parser_finds_what_there_is() -> None:
    texts = {command.bare for command in COMMANDS}
    assert len(COMMANDS) > 100
    assert {"scripts/test tests/unit -k scheduler", "pageant doctor", "scripts/roll", "pageant bench kernels"} <= texts
    assert not is_command("scripts/bench/common/host.py") and not is_command("pageant") and is_command("scripts/chaos")


@pytest.mark.parametrize("command", COMMANDS, ids=ids)
def test_something_runs_it(command: Command) -> None:
    entry = how(command.bare)
    assert entry is not None, f"{command}: nothing runs it, as far as tests/unit/docs/table.py says"
    if isinstance(entry, RunBy):
        assert entry.word in (ROOT / entry.path).read_text(encoding="utf-8"), f"{entry.path} does not run {command}"


def test_every_entry_is_of_use() -> None:
    begun = {begin for begin in TABLE if any(command.bare.startswith(begin) for command in COMMANDS)}
    idle = set(TABLE) - begun - {"scripts/setup", "scripts/run"}
    assert not idle, "no document has such a command any more"


@pytest.mark.parametrize("command", COMMANDS, ids=ids)
def test_its_program_its_options_and_its_files_exist(command: Command) -> None:
    words = command.words
    if words[0] == "pageant":
        check_pageant(command, words[1:])
    elif words[0].startswith("scripts/"):
        check_script(command, words)
    elif words[:2] == ["docker", "compose"]:
        check_compose(command, words[2:])
    elif words[0] == "curl":
        check_curl(command, words[1:])
    elif words[0] == "pytest":
        check_files(command, words[1:])
    elif words[:2] == ["python", "-m"]:
        module = ROOT / words[2].replace(".", "/")
        assert (module / "__main__.py").exists() or module.with_suffix(".py").exists(), command
    for word in words:
        assert not word.startswith("models/") or (ROOT / word).exists(), f"{command}: there is no {word}"
    for variable in command.variables:
        name = variable.partition("=")[0]
        known = {f"PAGEANT_{field.upper()}" for field in places()}
        assert name in known or any(name in text for text in sources()), f"{command}: nothing reads {name}"


def check_pageant(command: Command, words: list[str]) -> None:
    found: click.Command = main
    while isinstance(found, click.Group) and words:
        following = found.get_command(click.Context(found), words[0])
        assert following is not None, f"{command}: there is no `{words[0]}`"
        found, words = following, words[1:]
    known = {option for parameter in found.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for word in words:
        if word.startswith("-") and not word[1:].isdigit():
            assert word.partition("=")[0] in known | {"--help"}, f"{command}: there is no option {word}"


def check_script(command: Command, words: list[str]) -> None:
    script = ROOT / words[0]
    assert script.is_file() or script.is_dir(), f"{command}: there is no such script"
    assert script.is_dir() or os.access(script, os.X_OK), f"{command}: it cannot be run"
    if OF_TOOLS.get(words[0]) == "pageant":
        check_pageant(command, ["quickstart", *words[1:]])
    elif OF_TOOLS.get(words[0]) == "pytest":
        check_files(command, words[1:])
    elif "--" in words:  # before another script and its options
        own, _, other = command.bare.partition(" -- ")
        check_script(Command(command.document, own), words[: words.index("--")])
        if not (name := other.split()[0]).isupper():  # it stands for any
            check_script(Command(command.document, f"scripts/{other}"), [f"scripts/{name}"])
    else:
        text = "".join(source.read_text(encoding="utf-8") for source in sources_of(script))
        for option in command.options:
            is_check = option == "--check" and "bench_parser(" in text
            assert is_check or f'"{option}"' in text or f"{option})" in text, (
                f"{command}: {words[0]} has no option {option}"
            )


def sources_of(script: Path) -> list[Path]:
    """A wrapper, and the module or package that it runs."""
    text = script.read_text(encoding="utf-8")
    found = [script]
    for module in re.findall(r"(?:run\"|-m scripts) (scripts\.[\w.]+)", text):
        file = ROOT / (module.replace(".", "/") + ".py")
        assert file.is_file() or (file.with_suffix("") / "__main__.py").is_file(), (
            f"{script} runs {module}, which is not"
        )
        found += [file] if file.is_file() else []
        found += sorted(file.parent.glob("*.py")) if file.stem in ("main", "prove") else []
    return found


def check_files(command: Command, words: list[str]) -> None:
    for word in words:
        if word.startswith("tests"):
            assert (ROOT / word.partition("::")[0]).exists(), f"{command}: there is no {word}"


def check_compose(command: Command, words: list[str]) -> None:
    assert set(words) & COMPOSE, f"{command}: which compose command?"
    for word in words:
        service, equals, _ = word.partition("=")
        assert not equals or service in SERVICES, f"{command}: compose.yaml has no service {service}"
    if "--profile" in words:
        profile = words[words.index("--profile") + 1]
        assert profile in (ROOT / "compose.yaml").read_text(encoding="utf-8"), f"{command}: there is no such profile"


def check_curl(command: Command, words: list[str]) -> None:
    assert {word for word in words if re.fullmatch(r"-\w+", word)} <= CURL, f"{command}: which option is that?"
    if "-d" in words:
        msgspec.json.decode(words[words.index("-d") + 1])
    routes = (ROOT / "services/gateway/http/app.py").read_text(encoding="utf-8")
    (url,) = (word for word in words if "localhost" in word or "127.0.0.1" in word)
    path = "/" + url.split("//")[-1].partition("/")[2]
    assert f'Route("{path}"' in routes, f"{command}: there is no {path}"


def sources() -> list[str]:
    names = ("compose.yaml", "Dockerfile", "tests/conftest.py", "tests/messages/test_golden.py")
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in names if (ROOT / name).exists()]
    return texts + [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")]


def test_links_lead_somewhere() -> None:
    for path, target in links():
        file, _, anchor = target.partition("#")
        place = (path.parent / file).resolve() if file else path
        assert place.exists(), f"{name_of(path)} links to {target}, which is not there"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", place.read_text(encoding="utf-8"), re.M)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{name_of(path)} links to {target}, which has no such heading"


def test_files_that_are_named_exist() -> None:
    missing = [f"{document}: {path}" for document, path in paths() if not is_there(path) and not path.startswith(MADE)]
    assert not missing


def is_there(path: str) -> bool:
    """As it stands, or as a module, or a pair of wrapper and package."""
    place = ROOT / path
    return place.exists() or place.with_suffix(".py").exists()


def test_every_script_is_in_a_document_or_in_the_table() -> None:
    named = {command.words[0] for command in COMMANDS}
    scripts = {
        f"scripts/{path.name}" for path in (ROOT / "scripts").iterdir() if path.is_file() and os.access(path, os.X_OK)
    }
    unknown = {script for script in scripts - named if how(script) is None}
    assert not unknown, "no document tells of them, and nothing is known to run them"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= MAX_README


def test_what_cannot_be_run_says_what_it_needs() -> None:
    assert all(entry.what for entry in TABLE.values() if isinstance(entry, Needs))
    assert all(path.is_file() for path in DOCUMENTS)
