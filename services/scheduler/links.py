"""The shell's links to workers and drafts: each life of a link has a number, by which late messages are told apart."""

from __future__ import annotations

import structlog

from services.scheduler.consistency.results import StepLost
from services.scheduler.membership.lives import Lives
from services.scheduler.scheduler import Scheduler
from shared.errors import ProtocolError
from shared.messages import Hello

log = structlog.get_logger()


class Links:
    """Opens them, and begins them anew where something is lost or invalid."""

    def __init__(self, core: Scheduler, lives: Lives) -> None:
        self.core = core
        self._lives = lives

    def greet(self, hello: Hello, *, is_new: bool) -> bool:
        """A member is on the roster; `is_new`: for the first time, or in a new life.  Returns whether it is a worker
        that was not known."""
        if hello.draft is not None and (is_new or hello.instance not in self.core.drafts.links):
            self.core.add_draft(hello.instance, self._lives.next_link(), hello.draft)
        if hello.worker is None or not (is_new or hello.instance not in self.core.replicas):
            return False
        self.core.add_worker(hello.instance, self._lives.next_link(), hello.worker)
        return True

    def renew_all(self) -> None:
        """All numbers given out so far may be taken for those of an earlier life."""
        for instance in list(self.core.replicas):
            self.core.renew_worker(instance, self._lives.next_link())
        for link in list(self.core.drafts.links.values()):
            self.core.add_draft(link.instance, self._lives.next_link(), link.capacity)

    def renew(self, instance: str, error: StepLost) -> None:
        """Start over after a message was lost, as when a connection broke and was made again."""
        log.error("step_lost", worker=instance, reason=str(error))
        self.core.renew_worker(instance, self._lives.next_link())

    def restart(self, instance: str, error: ProtocolError) -> None:
        """Start over with a worker whose answers are invalid: a new epoch, an empty pool."""
        log.error("worker_out_of_step", worker=instance, reason=str(error))
        capacity = self.core.replicas[instance].capacity
        self.core.lose_worker(instance)
        self.core.add_worker(instance, self._lives.next_link(), capacity)

    def restart_draft(self, epoch: int, error: ProtocolError) -> None:
        """The same with the draft of this link, whose proposals are invalid."""
        if (link := self.core.drafts.by_epoch(epoch)) is not None:
            log.error("draft_out_of_step", draft=link.instance, reason=str(error))
            self.core.add_draft(link.instance, self._lives.next_link(), link.capacity)
