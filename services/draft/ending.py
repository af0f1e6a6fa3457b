"""Where a sequence ends: a draft guesses no tokens beyond its end."""

from __future__ import annotations

import msgspec

from shared.messages import AdmittedSequence


class Ending(msgspec.Struct, frozen=True):
    max_length: int  # tokens, prompt and output
    min_length: int  # before it no token ends the sequence
    end_ids: frozenset[int]

    def follows(self, token_id: int, length: int) -> bool:
        """Whether anything can follow this token, with which the sequence is `length` long."""
        return length < self.max_length and not (length >= self.min_length and token_id in self.end_ids)

    def cut(self, token_ids: list[int], length: int) -> list[int]:
        """Of tokens that follow the first `length` tokens, those before the sequence ends."""
        for index, token_id in enumerate(token_ids):
            if not self.follows(token_id, length + index + 1):
                return token_ids[: index + (length + index < self.max_length)]
        return token_ids


def read_ending(sequence: AdmittedSequence, max_model_len: int) -> Ending:
    params = sequence.params
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(sequence.eos_token_ids))
    longest = max_model_len
    if params.max_tokens is not None:
        longest = min(longest, sequence.num_prompt_tokens + params.max_tokens)
    return Ending(longest, sequence.num_prompt_tokens + params.min_tokens, frozenset(ends))
