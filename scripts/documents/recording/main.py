"""Records a worker that is killed in mid-stream, and draws it: scripts/record_demo [--draw]

Writes docs/images/killed.json (what happened, with date and machine) and docs/images/killed.svg.  With `--draw`
nothing is run: the picture is drawn again from the recording.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import msgspec

from scripts.documents.recording.film import draw
from scripts.documents.recording.scene import ROOT, Scene, play

IMAGES = ROOT / "docs" / "images"
RECORDING, PICTURE = IMAGES / "killed.json", IMAGES / "killed.svg"


def recorded() -> Scene:
    return msgspec.json.decode(RECORDING.read_bytes(), type=Scene)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="run nothing: draw the recording that there is")
    if not parser.parse_args().draw:
        with tempfile.TemporaryDirectory(prefix="pageant-demo-") as directory:
            found = play(Path(directory))
        if found.status_of_diff:
            print("the two answers differ; nothing is written", file=sys.stderr)
            return 1
        RECORDING.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    found = recorded()
    PICTURE.write_text(draw(found), encoding="utf-8")
    print(
        f"killed after {found.killed_at:.2f} s, a pause of {found.pause:.2f} s, no difference: docs/images/killed.svg"
    )
    return 0
