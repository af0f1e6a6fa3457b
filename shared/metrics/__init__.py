"""The field's metrics, defined once: client, server and simulator compute them here and nowhere else.

    TTFT   first output - start
    E2EL   last output - start
    ITL    each gap between two outputs of one request; the same as TBT (time between tokens)
    TPOT   (E2EL - TTFT) / (n - 1), which leaves the first token out; some call this the mean ITL.
           The other definition, E2EL / n, is `tpot_with_first`
    RPS    requests / second of the run; QPS in serial use: n / sum of latencies; QPM = 60 RPS
    TPS    tokens / second of the run
    TP50   the 50th percentile, by linear interpolation between order statistics; TP90, TP99 alike
    goodput    requests / second that met every target (SLO)
    MFU    arithmetic done / what the device could have done in that time
    acceptance    accepted draft tokens / proposed ones; its length: tokens per verification, 1 + accepted / drafts

The start is the moment at which the client meant to send, or at which the server took the request in: the caller
decides.  Times are seconds here; documents and reports show milliseconds.
"""

from __future__ import annotations

from shared.metrics.latency import Timeline
from shared.metrics.percentiles import Summary, Tally, percentile, summarise
from shared.metrics.rates import (
    Acceptance,
    ModelWork,
    Slo,
    parse_slo,
    peak_concurrency,
    peak_rate,
    per_minute,
    rate,
    serial_rate,
    utilisation,
)
