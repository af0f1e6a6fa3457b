"""Every command of the documents that a test machine can run is run, as it stands but for ports and folders.

What is to be run here `tests/unit/docs/table.py` says; a command that is new in a document is found and run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.harness import ROOT, Troupe, troupe
from tests.unit.docs.reading import Block, Command, blocks, commands
from tests.unit.docs.table import Run, how
from tests.unit.docs.transcripts import Transcript, transcripts

TIMEOUT = 240.0  # seconds, of one command
HERE = [command for command in commands() if isinstance(how(command.bare), Run)]
ORDERS = ("pageant scale", "pageant restart")
ONCE = {
    " ".join(command.words): command  # the first document that has it names it
    for command in reversed(HERE)
    if not command.bare.startswith(("pageant serve", *ORDERS))
}
CODE = [block for block in blocks() if block.language == "python" and "import" in block.text]
STATEMENTS = [block for block in blocks() if block.language == "python" and "import" not in block.text]
TALK = "Hello\n/quit\n"
ASKED = ("pageant generate", "pageant chat")
BUNDLED = "models/pageant-stories"
NUMBERS = {
    "bench kernels": ["--rows", "1", "--context", "64", "--threads", "1"],
    "bench messages": ["--sizes", "1"],
}  # of what takes long
OPENAI = 'from openai import OpenAI\nclient = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")\n'


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Troupe]:
    """As README has it, with two of each that its `pageant scale` names."""
    options = ["--num-threads", "1", "--num-blocks", "512", "--log-steps"]
    with troupe(tmp_path_factory.mktemp("docs"), *options) as served:
        yield served


@pytest.fixture(scope="module")
def asked(running: Troupe) -> str:
    """The id of a request that has ended, for what looks at logs."""
    done = run(running, Command("test", 'pageant generate "Once upon a time" --max-tokens 4'), running.log_dir)
    assert done.returncode == 0, done.stderr
    return str(next(line["request_id"] for line in running.logs() if line["event"] == "request_finished"))


def run(running: Troupe, command: Command, directory: Path) -> subprocess.CompletedProcess[str]:
    """With the ports and folders of this deployment."""
    bare = " ".join(command.words[:2])
    words = [adapted(word, running, directory) for word in command.words]
    if words[0] == "pageant":
        words = [sys.executable, "-m", "services.cli", *words[1:], *beside(bare, command, running, directory)]
    if words[0] == "curl":
        words += ["-sS", "--fail-with-body", "--max-time", str(TIMEOUT)]
    return subprocess.run(words, cwd=ROOT, input=TALK, capture_output=True, text=True, timeout=TIMEOUT, check=False)


def adapted(word: str, running: Troupe, directory: Path) -> str:
    word = re.sub(r"(localhost|127\.0\.0\.1):8000", running.url.removeprefix("http://"), word)
    word = word.replace("127.0.0.1:50051", running.address)
    return {"logs/": str(running.log_dir), "out.json": f"{directory}/out.json", "out.html": f"{directory}/o.html"}.get(
        word, word
    )


def beside(bare: str, command: Command, running: Troupe, directory: Path) -> list[str]:
    """What has to be said of a deployment that is not at the usual place."""
    if bare in ASKED:
        return ["--address", running.address, *([] if "--max-tokens" in command.words else ["--max-tokens", "8"])]
    if bare in ORDERS:
        return ["--runtime-dir", str(running.log_dir.parent / "run")]
    if bare == "pageant top":
        return ["--url", f"{running.url}/metrics", *([] if "--once" in command.words else ["--once"])]
    if bare == "pageant doctor":
        return ["--port", "0", "--http-port", "0", "--num-blocks", "64", "--runtime-dir", f"{directory}/run"]
    if bare == "pageant trace" and not {"-l", "--logs", "--help"} & set(command.words):
        return ["--logs", str(running.log_dir)]
    return NUMBERS.get(" ".join(command.words[1:3]), [])


@pytest.mark.parametrize("command", ONCE.values(), ids=str)
def test_it_runs(command: Command, running: Troupe, asked: str, tmp_path: Path) -> None:
    if " ".join(command.words[:2]) in ASKED and len(command.words) < 3 and "generate" in command.bare:
        command = Command(command.document, f'{command.text} "Once"')
    if command.bare == "pageant generate --explain":
        command = Command(command.document, f'{command.text} "Once"')
    if command.bare == "pageant trace":
        command = Command(command.document, f"{command.text} {asked}")
    text = command.text.replace("pageant trace 4be1", f"pageant trace {asked[:8]}")
    done = run(running, Command(command.document, text), tmp_path)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert (done.stdout + done.stderr).strip(), f"{command} says nothing"
    if command.words[0] == "curl":
        assert '"error"' not in done.stdout and ("choices" in done.stdout or "data" in done.stdout)


@pytest.mark.parametrize("block", CODE, ids=lambda block: block.document)
def test_python_runs(block: Block, running: Troupe) -> None:
    """What is awaited outside of a function runs in one."""
    text = block.text
    if "async with" in text and "def " not in text:
        imports, code = text.split("\n\n", 1)
        text = f"{imports}\nimport asyncio\nasync def main():\n{indented(code)}\nasyncio.run(main())\n"
    assert python(text, running).strip(), "it prints something"


@pytest.mark.parametrize("block", STATEMENTS, ids=lambda block: block.document)
def test_statements_run(block: Block, running: Troupe) -> None:
    python(OPENAI + block.text, running)


def python(text: str, running: Troupe) -> str:
    text = text.replace("http://127.0.0.1:8000", running.url).replace("127.0.0.1:50051", running.address)
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def indented(code: str) -> str:
    return "".join(f"    {line}\n" for line in code.splitlines())


def served() -> list[list[str]]:
    """The options of every `pageant serve` of the documents, each once; the harness names the model itself.

    Options that another one has too, beside more, are served with those.
    """
    told = [command.words[2:] for command in HERE if command.bare.startswith("pageant serve ")]
    found = {tuple(word for word in words if word != BUNDLED) for words in told if not {"-h", "--help"} & set(words)}
    return [list(options) for options in sorted(found) if not any(set(options) < set(more) for more in found)]


@pytest.mark.parametrize("options", served(), ids=" ".join)
def test_serving_as_the_documents_do_scaling_and_restarting(options: list[str], tmp_path: Path) -> None:
    """`pageant serve` with the documents' own options, and then their orders to one of these deployments."""
    orders = list({tuple(order.words): order for order in HERE if order.bare.startswith(ORDERS)}.values())
    assert options and orders
    orders = orders if options == served()[-1] else []
    with troupe(tmp_path, "--num-threads", "1", "--num-blocks", "256", *options) as running:
        for order in orders:
            done = run(running, order, tmp_path)
            assert done.returncode == 0, f"{order}\n{done.stdout}\n{done.stderr}"
        said = run(running, Command("test", 'pageant generate "Once" --max-tokens 4'), tmp_path)
        assert said.returncode == 0, said.stderr


@pytest.mark.parametrize("transcript", transcripts(), ids=lambda transcript: transcript.path.name)
def test_a_transcript_is_what_is_printed_now(transcript: Transcript) -> None:
    """PAGEANT_WRITE_GOLDEN=1 writes them anew."""
    text = transcript.made_anew()
    if os.environ.get("PAGEANT_WRITE_GOLDEN"):
        transcript.write(text)
        return
    assert transcript.says(text), f"{transcript.path.name} has\n{transcript.text}\nand now it is\n{text}"
