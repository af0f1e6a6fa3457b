"""How a setting is described beside its declaration: its topic, whether it is a common one, a sentence."""

from __future__ import annotations

import msgspec


class Topic:
    """Settings that are listed together."""

    def __init__(self, title: str) -> None:
        self.title = title

    def common(self, sentence: str) -> msgspec.Meta:
        """A setting that most deployments look at."""
        return msgspec.Meta(title=self.title, description=sentence, extra={"is_common": True})

    def advanced(self, sentence: str) -> msgspec.Meta:
        """A setting whose default rarely needs a change."""
        return msgspec.Meta(title=self.title, description=sentence, extra={"is_common": False})
