"""A scheduler that tells what its workers' pools hold."""

from __future__ import annotations

from services.scheduler.actor import SchedulerActor
from services.scheduler.membership.lives import Lives
from services.scheduler.publishing.payloads import Form, encode_events
from services.scheduler.publishing.publisher import EventPublisher
from services.scheduler.scheduler import Scheduler
from shared.config import Settings
from shared.transport import Transport


class PublishingActor(SchedulerActor):
    """Publishes after each batch of messages, behind the plans."""

    def __init__(self, transport: Transport, settings: Settings, core: Scheduler, lives: Lives) -> None:
        """Raises ConfigError where an endpoint cannot be bound."""
        chosen = settings.events
        self.publisher = EventPublisher(
            chosen.kv_events, chosen.kv_events_replay, chosen.kv_events_topic, chosen.kv_events_kept
        )
        self._form: Form = chosen.kv_events_format
        core.events.is_on = True
        super().__init__(transport, settings, core, lives)

    def before_flush(self) -> None:
        super().before_flush()
        self.afterwards(self._publish)

    def _publish(self) -> None:
        for rank, events in self.core.events.take():
            self.publisher.publish(encode_events(self.now, events, rank, self._form))

    async def on_stop(self) -> None:
        await super().on_stop()
        self.publisher.close()
