"""The gRPC interface from a second language: stubs that Node makes of our protos at run time, against a real troupe.

scripts/prove_node installs what it needs and runs it; without that it skips.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.system.harness import ROOT, ask, troupe

CLIENT = Path(__file__).with_name("node") / "client.cjs"
MODULES = os.environ.get("PAGEANT_NODE_MODULES", "")

pytestmark = pytest.mark.skipif(
    shutil.which("node") is None or not (Path(MODULES) / "@grpc" / "grpc-js").is_dir(),
    reason="needs Node and the packages that scripts/prove_node installs (PAGEANT_NODE_MODULES)",
)


def test_node_speaks_our_protocol(tmp_path: Path) -> None:
    with troupe(tmp_path, "--num-blocks", "256", "--num-threads", "1") as running:
        command = ["node", str(CLIENT), running.address, str(ROOT / "protos")]
        environment = os.environ | {"NODE_PATH": MODULES}
        done = subprocess.run(command, env=environment, capture_output=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr.decode()
        seen: dict[str, Any] = json.loads(done.stdout)
        ((same,),) = running.generate([ask("One day", seed=7, temperature=1.0, max_tokens=24)])
        assert (seen["whole"]["text"], seen["whole"]["token_ids"]) == (same.text, same.token_ids)
        assert seen["text"] == same.text.lstrip() or seen["text"] == same.text
        assert seen["whole"]["usage"]["completion_tokens"] == 24 and seen["whole"]["status"] == "OK"
        assert len(seen["whole"]["request_id"]) == 32
        assert seen["tokens"] == [0, 414, 438, 262, 388]
        assert seen["models"][0]["name"] == "pageant-stories" and seen["models"][0]["vocab_size"] == 4096
        assert seen["chat"]["status"] == "OK" and seen["chat"]["text"]
        assert (seen["refused"]["status"], seen["refused"]["field"]) == ("INVALID_ARGUMENT", "temperature")
        assert seen["cancelled"]["status"] == "CANCELLED"
        assert running.settled_load().num_aborted >= 1


@pytest.mark.skipif(not (Path(MODULES) / "@anthropic-ai" / "sdk").is_dir(), reason="needs @anthropic-ai/sdk and openai")
def test_the_official_packages_speak_http(tmp_path: Path) -> None:
    options = ("--num-blocks", "256", "--num-threads", "1", "--tool-call-parser", "hermes")
    with troupe(tmp_path, *options) as running:
        command = ["node", str(CLIENT.with_name("apis.cjs")), running.url, "pageant-stories"]
        done = subprocess.run(command, env=os.environ | {"NODE_PATH": MODULES}, capture_output=True, timeout=120,
                              check=False)  # fmt: skip
        assert done.returncode == 0, done.stderr.decode()
        seen: dict[str, Any] = json.loads(done.stdout)
    found = seen["responses"]
    name, arguments = found["whole"]
    assert name == "weather" and json.loads(arguments)["place"] in ("Oslo", "Rome")
    assert found["deltas"] == found["gathered"] == arguments and found["next"] and found["previous"]
    found = seen["messages"]
    assert found["whole"] == found["gathered"] and len(found["whole"]) > 20 and found["stop"] == "max_tokens"
    assert found["input"]["place"] in ("Oslo", "Rome") and found["reason"] == "tool_use" and found["count"]
    assert found["refused"] == [400, "invalid_request_error"]
