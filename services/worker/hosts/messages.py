"""What a rank and its leader say before the rank loads anything.

a rank -> leader   RankHello, on its first connection; LinkHello on the second, which the steps' data pass
leader -> a rank   RankWelcome, or RankRefused
"""

from __future__ import annotations

import msgspec

from shared.config import EngineSettings, MemorySettings, SchedulingSettings, Settings, SpeculationSettings

ANY = -1  # a rank that leaves its number to the leader


class RankHello(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A process offers to be a rank."""

    schema: str  # of messages: that of its version
    rank: int = ANY


class LinkHello(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The second connection of the rank that was given this token."""

    token: bytes


class RankRefused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Why the group has no place for it; `for_good`: starting it again would not help."""

    reason: str
    for_good: bool


class RankWelcome(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Its place, and the settings that all ranks must have alike."""

    rank: int
    ranks: int
    token: bytes
    engine: EngineSettings
    memory: MemorySettings
    scheduling: SchedulingSettings
    speculation: SpeculationSettings

    def apply(self, own: Settings) -> Settings:
        """The leader's settings; those that say what this host has stay its own."""
        engine = own.engine
        here = {name: getattr(engine, name) for name in ("model", "num_threads", "cpu_target")}
        return msgspec.structs.replace(
            own,
            engine=msgspec.structs.replace(self.engine, **here),
            memory=self.memory,
            scheduling=self.scheduling,
            speculation=self.speculation,
        )


def welcome(settings: Settings, rank: int, token: bytes) -> RankWelcome:
    return RankWelcome(
        rank=rank,
        ranks=settings.engine.members,
        token=token,
        engine=settings.engine,
        memory=settings.memory,
        scheduling=settings.scheduling,
        speculation=settings.speculation,
    )
