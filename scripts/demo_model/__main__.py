"""Train the bundled story model and its draft, from plain text to Hugging Face directories.

    python -m scripts.demo_model corpus --cased FILE --lower FILE --work DIR
    python -m scripts.demo_model train  --work DIR --size target|draft [--minutes 60] [--threads 2]
    python -m scripts.demo_model export --work DIR --size target|draft --out DIR
    python -m scripts.demo_model head   --work DIR --model DIR --out DIR [--minutes 10] [--threads 2]

`corpus` cleans and tokenizes the stories (restoring the case of the lower-cased ones), `train` can be stopped and
started again at any time, `export` writes config.json, model.safetensors, the tokenizer and generation defaults.
`head` trains an EAGLE-3 head for the exported model, and writes it whenever it ends.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from scripts.demo_model.corpus import build_corpus
from scripts.demo_model.export import export
from scripts.demo_model.head import train_head
from scripts.demo_model.model import SHAPES
from scripts.demo_model.training import train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    corpus = verbs.add_parser("corpus")
    corpus.add_argument("--cased", type=Path, required=True)
    corpus.add_argument("--lower", type=Path, required=True)
    corpus.set_defaults(run=build_corpus)
    training = verbs.add_parser("train")
    training.add_argument("--steps", type=int, default=1500)
    training.add_argument("--minutes", type=float, default=120)
    training.add_argument("--batch", type=int, default=8)
    training.add_argument("--context", type=int, default=512)
    training.add_argument("--lr", type=float, default=3e-3)
    training.add_argument("--dropout", type=float, default=0.1)
    training.add_argument("--threads", type=int, default=2)
    training.set_defaults(run=train)
    exporting = verbs.add_parser("export")
    exporting.add_argument("--out", type=Path, required=True)
    exporting.set_defaults(run=export)
    head = verbs.add_parser("head")
    head.add_argument("--model", type=Path, required=True)
    head.add_argument("--out", type=Path, required=True)
    head.add_argument("--start", type=Path, help="directory of a head that is trained further")
    head.add_argument("--texts", type=int, default=2048)
    head.add_argument("--steps", type=int, default=1500)
    head.add_argument("--minutes", type=float, default=45)
    head.add_argument("--batch", type=int, default=16)
    head.add_argument("--lr", type=float, default=3e-3)
    head.add_argument("--threads", type=int, default=2)
    head.set_defaults(run=train_head)
    for verb in (corpus, training, exporting, head):
        verb.add_argument("--work", type=Path, required=True)
    for verb in (training, exporting):
        verb.add_argument("--size", choices=sorted(SHAPES), required=True)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
