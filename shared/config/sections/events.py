"""KV events, which the scheduler publishes for routers."""

from typing import Annotated, Literal

from shared.config.section import Section, advanced


class EventSettings(Section, frozen=True, kw_only=True):
    TITLE = "KV events"
    kv_events: Annotated[
        str,
        advanced(
            "Address at which the scheduler publishes what workers' caches hold, as vLLM's KV events, such as "
            "tcp://127.0.0.1:5557. They have the token ids of prompts, but of no salted ones. Empty: none."
        ),
    ] = ""
    kv_events_replay: Annotated[
        str, advanced("Address at which events that were missed can be asked for. Empty: none.")
    ] = ""
    kv_events_topic: Annotated[
        str, advanced("Topic of the events; llm-d reads kv@ADDRESS@MODEL, with the address at which requests go.")
    ] = ""
    kv_events_format: Annotated[
        Literal["map", "array"],
        advanced("Form of an event: a map with its type, or an array, for readers made for earlier versions of vLLM."),
    ] = "map"
    kv_events_kept: Annotated[int, advanced("Messages of events that are kept to be asked for.")] = 10_000
