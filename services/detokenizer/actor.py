"""The detokenizer's shell: token batches in, one text batch per gateway out."""

from __future__ import annotations

import time

from services.detokenizer.decoder import DecoderFactory
from services.detokenizer.table import StreamTable
from shared.actor import MemberActor
from shared.actor.actor import Handlers
from shared.config import Settings
from shared.messages import (
    DetokenizerInbox,
    Fingerprint,
    Member,
    Refused,
    Roster,
    ServiceName,
    TextBatch,
    Tick,
    TokenBatch,
)
from shared.transport import Transport


class DetokenizerActor(MemberActor):
    """Holds soft state only: a stream that is lost here is opened again, from its first token, elsewhere."""

    service = ServiceName.DETOKENIZER
    inbox_union = DetokenizerInbox

    def __init__(
        self,
        transport: Transport,
        settings: Settings,
        decoders: DecoderFactory,
        instance: str | None = None,
        text: Fingerprint | None = None,
    ) -> None:
        super().__init__(transport, settings, instance)
        self.table = StreamTable(decoders)
        self._text = text

    def fingerprint(self) -> Fingerprint | None:
        return self._text

    def handlers(self) -> Handlers:
        return {
            TokenBatch: self.handle_tokens,
            Roster: self.handle_roster,
            Refused: self.handle_refused,
            Tick: self.handle_tick,
        }

    def handle_tokens(self, batch: TokenBatch) -> None:
        self.table.apply(batch, time.time(), self.busy_since)

    def before_flush(self) -> None:
        for gateway, sequences in self.table.take_texts(time.time()).items():
            self.send(gateway, TextBatch(sequences))
        for gateway, rejection in self.table.take_rejections():
            self.send(gateway, rejection)
        for notice in self.table.take_notices():
            self.send(self.scheduler, notice)

    def on_roster(self, joined: list[Member], left: list[Member]) -> None:
        present = {member.address for member in self.roster.members}
        for member in left:
            if member.service is ServiceName.GATEWAY and member.address not in present:
                self.table.forget_gateway(member.address)

    def on_new_scheduler(self) -> None:
        self.table.clear()

    def on_forgotten(self) -> None:
        self.table.clear()  # others have these streams now
