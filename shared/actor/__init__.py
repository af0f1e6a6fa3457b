"""The actor: one mailbox, synchronous handlers, effects flushed once per batch."""

from __future__ import annotations

from shared.actor.actor import Actor, LifePhase
from shared.actor.member import MemberActor
from shared.actor.process import run_actor

__all__ = ["Actor", "LifePhase", "MemberActor", "run_actor"]
