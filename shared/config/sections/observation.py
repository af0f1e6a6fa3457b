"""Logs, metrics and recordings."""

from typing import Annotated, Literal

from shared.config.section import Section, advanced, common


class ObservationSettings(Section, frozen=True, kw_only=True):
    TITLE = "Logs and metrics"
    record: Annotated[
        str,
        advanced(
            "File in which the scheduler notes what it is asked, token ids too, for `pageant replay`. Empty: none."
        ),
    ] = ""
    record_bytes: Annotated[int, advanced("Size at which that recording ends; it is compressed.")] = 256 << 20
    record_steps: Annotated[
        str, advanced("File in which the worker notes every step, for `pageant simulate --recorded`. Empty: none.")
    ] = ""
    metrics_port: Annotated[
        int,
        common(
            "Port of /metrics at each service, for Prometheus; `pageant serve` counts up from it. 0: any free one; "
            "-1: none."
        ),
    ] = -1
    log_steps: Annotated[bool, advanced("A log line for each step, which `pageant trace` draws.")] = False
    tracing: Annotated[
        bool, advanced("Account for the time of each request, and say what is done for it at each service.")
    ] = True
    log_level: Annotated[
        Literal["auto", "debug", "info", "warning", "error"],
        common("Least severe log lines that are written. auto: warning on a terminal, else info."),
    ] = "auto"
    log_format: Annotated[
        Literal["auto", "console", "json"], common("Form of log lines. auto: console on a terminal, else json.")
    ] = "auto"
