"""What may become a prompt, and what a tokenized prompt says to the scheduler.  No I/O and no clock."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from services.tokenizer.chats import num_bytes
from shared.errors import ProtocolError, RejectCode, RequestError
from shared.messages import AddRequest, ChatMessage, ChatOptions, EncodeRequest, TokenizeRequest
from shared.packing import pack_tokens, unpack_tokens
from shared.requests.reasoning import is_left_open
from shared.requests.sampling import Limits, SamplingParams, check_sampling, check_token_ids, too_long
from shared.text.tokenization import ModelTokenizer

ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
DEFAULT_MAX_TOKENS = 16  # of a text or token prompt; a chat may use the rest of the context
UNKNOWN = 1 << 30  # a limit that only the scheduler can check


class PromptRules:
    """Checks requests before any costly work, and completes them after it.

    The scheduler's admission has the last word; what is refused here could not pass there.
    """

    def __init__(self, tokenizer: ModelTokenizer, *, max_prompt_bytes: int, max_logprobs: int, max_n: int) -> None:
        self._tokenizer = tokenizer
        self._max_prompt_bytes = max_prompt_bytes
        self._limits = Limits(
            vocab_size=tokenizer.vocab_size,
            max_model_len=UNKNOWN,
            max_input_length=UNKNOWN,
            max_logprobs=max_logprobs,
            max_n=max_n,
        )

    def check(self, request: TokenizeRequest, *, max_input_length: int, now: float) -> None:
        """Raise RequestError on whatever can be known to be wrong before tokenizing.

        `max_input_length` in tokens, 0 where it is not known yet.
        """
        check_deadline(request.header.deadline, now)
        prompts = (request.text, request.chat, request.token_ids)
        if sum(prompt is not None for prompt in prompts) != 1:
            raise RequestError("prompt must be exactly one of text, chat and token ids", field="prompt")
        check_sampling(request.params, self._limits, 1)
        if request.text is not None:
            if not request.text:
                raise RequestError("prompt must not be empty", field="prompt")
            self.check_size(_num_bytes(request.text), "prompt")
            self.check_length(request.text, max_input_length, "prompt")
        elif request.chat is not None:
            self.check_chat(request.chat, request.chat_options)
        elif request.token_ids is not None:
            self.check_size(len(request.token_ids), "token_ids")

    def check_encode(self, request: EncodeRequest) -> None:
        """Raise RequestError unless there is exactly one thing to encode, of reasonable size."""
        if (request.text is None) == (request.chat is None):
            raise RequestError("prompt must be exactly one of text and chat", field="prompt")
        if request.text is not None:
            self.check_size(_num_bytes(request.text), "prompt")
        elif request.chat is not None:
            self.check_chat(request.chat, request.chat_options)

    def check_length(self, text: str, max_input_length: int, field: str) -> None:
        """Raise RequestError where even the longest tokens would not make `text` short enough."""
        longest = self._tokenizer.max_chars_per_token
        if not max_input_length or longest is None:
            return
        if len(text) > max_input_length * longest:
            raise too_long(field, f"{len(text)} characters", f"max_input_length={max_input_length} tokens")

    def check_chat(self, chat: Sequence[ChatMessage], options: ChatOptions | None = None) -> None:
        if not chat:
            raise RequestError("chat must contain at least one message", field="chat")
        if self._tokenizer.chat_template is None:
            raise RequestError("chat is not possible: the model has no chat template", field="chat")
        for place, message in enumerate(chat):
            if not ROLE.fullmatch(message.role):  # which roles there are is the template's business
                field = f"chat.messages[{place}].role"
                raise RequestError(f"{field} must be a word, got {message.role[:32]!r}", field=field)
        self.check_size(num_bytes(chat, options), "chat")

    def unpack(self, packed: bytes) -> list[int]:
        """Token ids of a question.  Raises RequestError where they are none of this model's."""
        try:
            token_ids = unpack_tokens(packed)
        except ProtocolError as error:
            raise RequestError(f"token_ids: {error}", field="token_ids") from error
        check_token_ids("token_ids", token_ids, self._tokenizer.vocab_size)
        return token_ids

    def complete(
        self,
        request: TokenizeRequest,
        prompt_token_ids: bytes,
        bad_words: list[list[int]],
        *,
        max_model_len: int,
        now: float,
    ) -> AddRequest:
        """The scheduler's version of a request.  `bad_words`: as of that method; `max_model_len` in tokens, 0 where it
        is not known yet."""
        num_prompt_tokens, rest = divmod(len(prompt_token_ids), 4)  # which ids they may be is for the scheduler to say
        if rest:
            text = f"token_ids has {len(prompt_token_ids)} bytes, which is not a multiple of 4"
            raise RequestError(text, field="token_ids")
        max_tokens = DEFAULT_MAX_TOKENS
        if request.chat is not None and max_model_len:
            max_tokens = max(1, max_model_len - num_prompt_tokens)
        params = request.params.resolved(self._tokenizer.defaults, max_tokens=max_tokens)
        return AddRequest(
            header=request.header,
            params=_with_opening(msgspec.structs.replace(params, bad_words_token_ids=bad_words), prompt_token_ids),
            prompt_token_ids=prompt_token_ids,
            eos_token_ids=self._tokenizer.defaults.eos_token_ids,
            sent_token_ids=request.sent_token_ids,
            sent_text_lengths=request.sent_text_lengths,
            tokenized_time=now,
            is_resumed=request.is_resumed,
            sent_finished=request.sent_finished,
            fingerprint=request.fingerprint,
        )

    def bad_words(self, params: SamplingParams) -> list[list[int]]:
        """The tokens of all words that are not wanted; in any thread.

        A word is banned at the start of a text and within it, where many tokenizers write it with its space.
        """
        if not params.bad_words:
            return params.bad_words_token_ids
        found = [tuple(ids) for ids in params.bad_words_token_ids]
        for word in params.bad_words:
            for text in (word, f" {word.lstrip()}"):
                found.append(tuple(self._tokenizer.encode_plain(text)))
        return [list(ids) for ids in dict.fromkeys(found)]

    def check_size(self, num_bytes: int, field: str) -> None:
        """Raise RequestError on more than is taken apart."""
        if num_bytes > self._max_prompt_bytes:
            raise RequestError(
                f"{field} has {num_bytes} bytes, more than max_prompt_bytes={self._max_prompt_bytes}", field=field
            )


def num_word_chars(params: SamplingParams) -> int:
    """Characters that `bad_words` tokenizes."""
    return 2 * sum(map(len, params.bad_words))


def _with_opening(params: SamplingParams, prompt_token_ids: bytes) -> SamplingParams:
    """Templates may open the reasoning: then the output begins within it."""
    budget = params.thinking
    if budget is None or budget.is_open or not is_left_open(prompt_token_ids, budget.tags):
        return params
    return msgspec.structs.replace(params, thinking=msgspec.structs.replace(budget, is_open=True))


def check_deadline(deadline: float | None, now: float) -> None:
    """Raise RequestError where the deadline has passed."""
    if deadline is not None and now >= deadline:
        raise RequestError("the deadline passed before the prompt was tokenized", code=RejectCode.DEADLINE_EXCEEDED)


def pack_prompt(token_ids: list[int]) -> bytes:
    """Packed ids; a text of no tokens at all is refused here, in words about the text."""
    if not token_ids:
        raise RequestError("prompt contains no tokens", field="prompt")
    return pack_tokens(token_ids)


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
