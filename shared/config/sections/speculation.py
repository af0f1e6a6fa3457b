"""Draft tokens: their source and their number."""

from typing import Annotated, Literal

from shared.config.section import Section, advanced, common

MAX_DRAFT_TOKENS = 64
EAGLE = "eagle:"


class SpeculationSettings(Section, frozen=True, kw_only=True):
    TITLE = "Speculation"
    draft: Annotated[
        str,
        common(
            "Speculative decoding: ngram looks drafts up in the text itself; a directory is a smaller model with the "
            "same tokenizer and without linear attention, run by a process of its own; eagle:DIRECTORY is an EAGLE "
            "head for this model, and mtp the layer of its checkpoint that drafts, which workers run. Drafts change no "
            "output."
        ),
    ] = "off"
    num_draft_tokens: Annotated[
        int,
        advanced("Draft tokens per sequence and step. 0: as many as pay by measurement, up to max_num_draft_tokens."),
    ] = 0
    max_num_draft_tokens: Annotated[int, advanced("Most draft tokens per sequence and step.")] = 8
    acceptance: Annotated[
        Literal["coupled", "rejection"],
        advanced(
            "coupled: the same tokens as without drafts. rejection: the same distribution, and more drafts accepted."
        ),
    ] = "coupled"
    prompt_lookup_min: Annotated[int, advanced("Fewest tokens of the text's end that ngram looks for.")] = 2
    prompt_lookup_max: Annotated[int, advanced("Most tokens of the text's end that ngram looks for.")] = 5
    draft_kv_cache_memory: Annotated[int, advanced("Bytes of KV cache of a draft's model.")] = 256 << 20
    draft_num_threads: Annotated[int, advanced("Threads of a draft's CPU kernels.")] = 1

    @property
    def has_head(self) -> bool:
        """Whether workers draft with a head of the model."""
        return self.draft == "mtp" or self.draft.startswith(EAGLE)

    @property
    def head_directory(self) -> str:
        """Of an EAGLE head; empty where there is none."""
        return self.draft.removeprefix(EAGLE) if self.draft.startswith(EAGLE) else ""

    @property
    def has_service(self) -> bool:
        """Whether processes of their own draft."""
        return self.draft != "off" and not self.has_head
