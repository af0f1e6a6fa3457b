"""From two text files to token ids: restored capitals, instructions, a tokenizer."""

from __future__ import annotations

import argparse
import random
import re
from collections import Counter
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from scripts.demo_model.model import SHAPES

EOS, USER, ASSISTANT, END = "<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIALS = [EOS, USER, ASSISTANT, END]


def read_stories(path: Path) -> list[str]:
    """Split a file in which single newlines part stories and double ones part paragraphs."""
    marked = path.read_text(encoding="utf-8").replace("\n\n", "\x00")
    return [story.replace("\x00", "\n\n").strip() for story in marked.split("\n") if len(story) > 80]


def restore_case(stories: list[str], cased: list[str]) -> list[str]:
    """Give lower-cased stories their capitals back: sentence starts, "I", and names.

    A word is a name where the cased stories mostly capitalise it inside a sentence, or where this
    story introduces it by "named".
    """
    forms: dict[str, Counter[str]] = {}
    for story in cased:
        for word in re.findall(r"(?<=[a-z,] )[A-Za-z]+", story):
            forms.setdefault(word.lower(), Counter())[word] += 1
    common = {word: counts.most_common(1)[0][0] for word, counts in forms.items()}

    def restore(story: str) -> str:
        names = set(re.findall(r"(?:named|called|name was|name is) ([a-z]+)", story)) - {"the", "a", "his", "her"}
        words = re.sub(
            r"(?<!')[a-z]+",
            lambda m: m[0].capitalize() if m[0] in names else common.get(m[0], m[0]),
            story,
        )
        words = re.sub(r"\bi\b", "I", words)
        return re.sub(
            r"(^|[.!?]\s+\"?|[.!?]\"\s+(?=[A-Z\"])|\n\s*\"?|[,:] \")([a-z])", lambda m: m[1] + m[2].upper(), words
        )

    return [restore(story) for story in stories]


def ask_for(story: str, rare: dict[str, int], rng: random.Random) -> str:
    """An instruction that this story would be a good answer to, naming a person or things in it."""
    name = re.search(r"(?:named|called|name was) ([A-Z][a-z]+)", story)
    kind = re.search(r"(?:a|an) (?:\w+ )?(\w+) (?:named|called)", story)
    if name and kind and rng.random() < 0.5:
        return f"Tell me a story about a {kind[1]} named {name[1]}."
    words = {word for word in re.findall(r"\b[a-z]{3,}\b", story) if 20 < rare.get(word, 0) < 1500}
    picked = sorted(words, key=lambda word: rare[word] + rng.random() * 300)[:2]
    if len(picked) < 2 or rng.random() < 0.2:
        return rng.choice(["Tell me a story.", "Please tell me a short story.", "Write a story for a child."])
    return rng.choice(["Tell me a story about a {}.", "Write a short story with a {} and a {}."]).format(*picked)


def train_tokenizer(stories: list[str], vocab: int) -> Tokenizer:
    """Byte-level BPE, so that no text is unknown to it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(stories, trainer)
    return tokenizer


def build_corpus(args: argparse.Namespace) -> None:
    rng = random.Random(1)
    cased = read_stories(args.cased)
    known = {story.lower() for story in cased}
    real = cased + restore_case([s for s in read_stories(args.lower) if s not in known], cased)
    rng.shuffle(real)
    held_out, real = real[:200], real[200:]
    tokenizer = train_tokenizer(real, SHAPES["target"]["vocab_size"])
    rare = Counter(word for story in real for word in set(re.findall(r"\b[a-z]{3,}\b", story)))
    args.work.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(args.work / "tokenizer.json"))

    def encode(story: str, instructed: bool) -> list[int]:
        text = f"{USER}{ask_for(story, rare, rng)}{END}{ASSISTANT}{story}{END}" if instructed else story
        return tokenizer.encode(EOS + text).ids

    for name, stories, share in (("real", real, 0.0), ("chat", real, 1.0), ("held_out", held_out, 0.0)):
        ids = [i for story in stories for i in encode(story, rng.random() < share)]
        np.save(args.work / f"{name}.npy", np.array(ids, dtype=np.uint16))
        print(f"{name}: {len(stories)} stories, {len(ids):,} tokens")
    chars = sum(map(len, held_out))
    print(f"held-out characters per token: {chars / len(np.load(args.work / 'held_out.npy')):.3f}")
