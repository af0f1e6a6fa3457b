"""Huge texts tokenized out of process, by a child that starts with the first of them."""

from __future__ import annotations

from services.tokenizer.confined.children import ChildPool
from services.tokenizer.confined.frames import Encoded, EncodeJob, EncodeSetup
from shared.fairness.fair_slots import FairSlots
from shared.messages.codec import MAX_MESSAGE_BYTES

HUGE_TEXT = 256 << 10  # characters; tenths of a second, which those with a long text should not wait for
TIMEOUT = 20.0  # seconds of a processor; 4 MB take some five
PATIENCE = 30.0  # seconds for a child, of one whose turn it is: another may have to come up first
MAX_MEMORY = 4 << 30  # of address space


class EncoderPool(ChildPool[Encoded]):
    """Tokenizes one text at a time, by turns of tenants."""

    module = "services.tokenizer.confined.encoder"
    field, action = "prompt", "tokenize"
    niceness = 10  # a huge text takes seconds of a processor that others have something to do with
    least_seconds = TIMEOUT

    def __init__(self, tokenizer: str) -> None:
        """`tokenizer`: as its file has it."""
        super().__init__(
            EncodeSetup(tokenizer=tokenizer, max_memory=MAX_MEMORY, max_cpu_seconds=int(2 * TIMEOUT)),
            EncodeJob(""),
            Encoded,
            timeout=TIMEOUT,
            patience=PATIENCE,
            max_answer_bytes=MAX_MESSAGE_BYTES,
            num_children=1,
        )
        self.slots = FairSlots(1)

    async def encode(self, tenant: str, job: EncodeJob) -> bytes:
        """Packed ids, once it has had its turn.  Raises RequestError where there are none in time."""
        async with self.slots.turn(tenant):
            await self.started()
            encoded = await self.ask(job)
        if encoded.error:
            raise self.refusal(encoded.error)
        return encoded.token_ids
