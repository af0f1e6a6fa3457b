"""Tasks for lm-eval that are made from a local file of stories: no hub is asked for anything.

stories_next     which of four passages follows: log-likelihoods of whole passages
stories_word     the last word of a sentence, generated: greedy text up to a space or a stop
stories_bits     how likely the text itself is: rolling log-likelihoods
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

TASKS = ("stories_next", "stories_word", "stories_bits")
COMMON = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
num_fewshot: 0
output_type: {kind}
"""
NEXT = """\
doc_to_text: context
doc_to_choice: choices
doc_to_target: label
metric_list:
  - metric: acc
  - metric: acc_norm
"""
WORD = """\
doc_to_text: context
doc_to_target: word
generation_kwargs:
  until: ["\\n", ".", ","]
  max_gen_toks: 12
  do_sample: false
  temperature: 0
filter_list:
  - name: first-word
    filter:
      - function: regex
        regex_pattern: "([A-Za-z]+)"
      - function: take_first
metric_list:
  - metric: exact_match
"""
BITS = """\
doc_to_text: ""
doc_to_target: text
metric_list:
  - metric: word_perplexity
  - metric: bits_per_byte
"""


def write_tasks(stories: Path, directory: Path, count: int) -> None:
    """Files of `count` examples each, and the tasks over them.  Passages come from the end of the file."""
    passages = [" ".join(part.split()) for part in stories.read_text(encoding="utf-8").split("\n\n")]
    passages = [passage for passage in passages if 60 < len(passage) < 400 and passage.isascii()]
    pairs = list(zip(passages[::2], passages[1::2], strict=False))[-count:]
    chance = random.Random(7)
    kinds = (
        ("stories_next", "multiple_choice", NEXT, [_next(pair, pairs, chance) for pair in pairs]),
        ("stories_word", "generate_until", WORD, [_word(before) for before, _ in pairs]),
        ("stories_bits", "loglikelihood_rolling", BITS, [{"text": f"{one} {two}"} for one, two in pairs[: count // 4]]),
    )
    for name, kind, more, examples in kinds:
        file = directory / f"{name}.jsonl"
        file.write_text("".join(json.dumps(example) + "\n" for example in examples), encoding="utf-8")
        text = COMMON.format(name=name, file=file, kind=kind) + more
        (directory / f"{name}.yaml").write_text(text, encoding="utf-8")


def _next(pair: tuple[str, str], pairs: list[tuple[str, str]], chance: random.Random) -> dict[str, Any]:
    others = chance.sample([other for _, other in pairs if other != pair[1]], 3)
    label = chance.randrange(4)
    choices = [*others[:label], pair[1], *others[label:]]
    return {"context": pair[0], "choices": choices, "label": label}


def _word(passage: str) -> dict[str, str]:
    """The passage up to the last word of its longest sentence, and that word."""
    sentence = max(re.findall(r"[^.!?]+[.!?]", passage) or [passage], key=len)
    end = passage.index(sentence) + len(sentence)
    words = re.findall(r"[A-Za-z]+", passage[:end]) or ["none"]
    return {"context": passage[: passage.rindex(words[-1], 0, end)].rstrip(), "word": words[-1]}
