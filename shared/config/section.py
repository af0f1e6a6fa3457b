"""What a section of the settings is, and how a setting is described beside its declaration."""

from __future__ import annotations

from typing import ClassVar

import msgspec


class Section(msgspec.Struct, frozen=True):
    """Settings of one topic.  Names are unique among all sections: users know no sections."""

    TITLE: ClassVar[str]


def common(sentence: str) -> msgspec.Meta:
    """A setting that most deployments look at."""
    return msgspec.Meta(description=sentence, extra={"is_common": True})


def advanced(sentence: str) -> msgspec.Meta:
    """A setting whose default rarely needs a change."""
    return msgspec.Meta(description=sentence, extra={"is_common": False})
