"""The client's name of a refused field: the services have one name for it, each endpoint's body has its own.

A body says in `client_names` which of its fields became a field of the services' messages, where the names differ, and
the endpoint in the request's state (`message_names`) what became the messages of a chat, where they are not the body's
`messages`, one by one.  What no body has is a header.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.types import Scope

from shared.errors import RequestError

HEADERS = {
    "label": "x-request-id",
    "idempotency_key": "idempotency-key",
    "resume": "last-event-id",
    "sent_token_ids": "last-event-id",
    "sent_finished": "last-event-id",
}
MESSAGE = re.compile(r"chat\.messages\[(\d+)\]")


def as_sent(error: RequestError, scope: Scope) -> tuple[str, str]:
    """The field of an error and its message, in the names of the request's own body."""
    state = scope.get("state", {})
    name = sent_name(state.get("body"), error.field, state.get("message_names"))
    text = str(error)
    if name == error.field or not name:
        return name, text
    own = re.escape(error.field)
    return name, re.sub(rf"^{own}(?![\w.\[-])", lambda _: name, text)


def sent_name(body: Any, field: str, message_names: Sequence[str] | None = None) -> str:
    """The client's name of a `field`; the same where it has no other."""
    if found := MESSAGE.match(field):
        place = int(found[1])
        return (message_names[place] if message_names else f"messages[{place}]") + field[found.end() :]
    names: Mapping[str, tuple[str, ...]] = getattr(body, "client_names", {})
    if names_of := names.get(field):
        given = (name for name in names_of if getattr(body, name) is not None)
        return next(given, HEADERS.get(field, names_of[-1]))
    return HEADERS.get(field, field)
