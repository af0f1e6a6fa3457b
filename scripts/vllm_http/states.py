"""What the checkpoint says: words that mean nothing, in the order in which a trained model writes them.

In a chat it may think first, between its tags; where tools are offered it calls one, else it says some words; then it
ends.  A plain text is sentences, behind which strings of a format are closed and a text ends now and then; where the
likeliest tokens are taken, it goes on for as long as it may.  A token's embedding is the state that follows it, and the
head has the tokens that come in each state.  The only part of the layers that does anything is one head of attention,
which tells whether the prompt speaks of calls.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

NEW_LINE = 198  # the last token of the template's opening of an answer, in Qwen3's vocabulary
EMPTY_LINE = 271  # the last token where the template has closed the reasoning itself
THINK, THINK_END, END_OF_TURN = 151_667, 151_668, 151_645
CALL, CALL_END = 151_657, 151_658
CALLED = ('{"', "name", '":"', "get", "_current", "_weather", '","', "arguments", '":', "{}", "}")  # tokens, each once
CLOSERS = ('"', "}", '"}', ",", "]")  # likelier than other tokens behind a sentence, or where a format leaves no word
WORD = re.compile("Ġ?[a-z]{3,}")  # as the vocabulary has it; with a number that few prompts end with
FIRST_WORD, WORDS = 30_000, 40  # of each state
THOUGHTS, ANSWERS = 8, 24  # words of reasoning, and of the answer
OPENING, REASONING, ANSWER = 0, 1, 2 + THOUGHTS  # states: the first of each kind
CALLING = ANSWER + ANSWERS + 1
TELLING, SENTENCE = CALLING + len(CALLED) + 1, 8  # the first state of a plain text, and how many there are
OFFERED = TELLING + SENTENCE  # a coordinate: how much of the context is about calls
SPEAKS_OF_CALLS, EVERY = OFFERED + 1, OFFERED + 2  # coordinates: of the tokens that are, and of all
STATE, ALWAYS = 1.0, 0.5  # coordinates of embeddings; the others have a standard deviation of 0.02
LIKELY, CALLS, CLOSING, SELDOM = 12.0, 12.0, 12.0, 1.0  # of the head, beside states of 4 to 7
CLOSES, ENDS = 6.0, 12.125  # of the head behind a sentence; with CLOSING as much as words
ATTENTION = 9.0


def make_stateful(path: Path, tokenizer: Path, *, thinks: bool) -> None:
    """Write the states over a checkpoint's random weights.  `tokenizer`: its tokenizer.json."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    vocabulary: dict[str, int] = json.loads(tokenizer.read_text())["model"]["vocab"]
    called = [vocabulary[text] for text in CALLED]
    words = sorted(token for text, token in vocabulary.items() if token >= FIRST_WORD and WORD.fullmatch(text))
    embeddings, head = tensors["model.embed_tokens.weight"].float(), tensors["lm_head.weight"].float()
    _embed(embeddings, words, called, thinks=thinks)
    _weigh(head, words, called)
    closers = [vocabulary[text] for text in CLOSERS]
    head[closers, EVERY] = CLOSING
    head[vocabulary[CLOSERS[0]], EVERY] = CLOSING + 1.25  # the others may stand in a string
    embeddings[[one for one in closers if one not in called], TELLING] = STATE / 2  # a format may allow more of them
    head[closers, TELLING + SENTENCE - 1] = CLOSES
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name].zero_()
    attention = "model.layers.0.self_attn"
    tensors[f"{attention}.v_proj.weight"][0, SPEAKS_OF_CALLS] = 1.0  # queries are zero: all tokens count the same
    tensors[f"{attention}.o_proj.weight"][OFFERED, 0] = ATTENTION
    kind = tensors["lm_head.weight"].dtype
    tensors |= {"model.embed_tokens.weight": embeddings.to(kind), "lm_head.weight": head.to(kind)}
    save_file(tensors, path, metadata={"format": "pt"})


def _embed(embeddings: Tensor, words: list[int], called: list[int], *, thinks: bool) -> None:
    """By token: the state that follows it; behind any token without one a text goes on."""
    follows = {NEW_LINE: OPENING if thinks else ANSWER, EMPTY_LINE: ANSWER}
    follows |= {THINK: REASONING, THINK_END: ANSWER, CALL: CALLING, CALL_END: ANSWER + ANSWERS}
    follows |= {token: CALLING + 1 + place for place, token in enumerate(called)}
    for first, count in ((REASONING, THOUGHTS), (ANSWER, ANSWERS), (TELLING, SENTENCE - 1)):
        for state in range(first, first + count):
            follows |= dict.fromkeys(_words(state, words), state + 1)
    embeddings[:, [OFFERED, SPEAKS_OF_CALLS]] = 0.0
    embeddings[:, EVERY] = ALWAYS
    embeddings[:, TELLING] = STATE
    for token, state in follows.items():
        embeddings[token, TELLING] = 0.0
        embeddings[token, state] = STATE
    embeddings[CALL, SPEAKS_OF_CALLS] = STATE


def _weigh(head: Tensor, words: list[int], called: list[int]) -> None:
    """By state: the tokens that may come next."""
    for first, count in ((REASONING, THOUGHTS), (ANSWER, ANSWERS), (TELLING, SENTENCE)):
        for state in range(first, first + count):
            head[_words(state, words), state] = LIKELY
    head[END_OF_TURN, TELLING + SENTENCE - 1] = ENDS
    ends = {OPENING: THINK, REASONING + THOUGHTS: THINK_END, ANSWER + ANSWERS: END_OF_TURN}
    steps = {CALLING + place: token for place, token in enumerate([*called, CALL_END])}
    for state, token in (ends | steps).items():
        head[token, state] = LIKELY
    head[CALL, [ANSWER, OFFERED, EVERY]] = head.new_tensor([LIKELY, CALLS, -SELDOM])  # none where none is offered


def _words(state: int, words: list[int]) -> list[int]:
    return words[WORDS * state : WORDS * (state + 1)]
