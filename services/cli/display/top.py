"""`pageant top`: how a deployment does now, read from /metrics again and again."""

from __future__ import annotations

import itertools
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus

import click

from services.cli.command_line.help import SectionedCommand
from services.cli.display.tables import aligned
from shared.metrics.histogram import quantile

TIMEOUT = 5.0  # seconds
CLEAR = "\x1b[H\x1b[J"  # home, and away with what is below
BAR = 24  # characters
QUANTILES = (("TTFT", "vllm:time_to_first_token_seconds"), ("ITL", "vllm:inter_token_latency_seconds"),
             ("queue", "vllm:request_queue_time_seconds"), ("whole", "vllm:e2e_request_latency_seconds"))  # fmt: skip
SERVICES = ("gateway", "tokenizer", "scheduler", "worker", "draft", "detokenizer", "store")

KEY_HINT: dict[int, str] = dict.fromkeys(
    (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN),
    ": give a key with --api-key, or PAGEANT_API_KEY in the environment",
)
Labels = tuple[tuple[str, str], ...]


class MetricsSample:
    """The samples of one moment."""

    def __init__(self, text: str, at: float) -> None:
        from prometheus_client.parser import text_string_to_metric_families

        self.at = at
        self._samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._samples.setdefault(sample.name, []).append((sample.labels, sample.value))

    def total(self, name: str) -> float:
        return sum(value for _, value in self._samples.get(name, ()))

    def by(self, name: str, label: str) -> dict[str, float]:
        found: dict[str, float] = {}
        for labels, value in self._samples.get(name, ()):
            found[labels.get(label, "")] = found.get(labels.get(label, ""), 0.0) + value
        return found


class View:
    """What is shown: gauges as they are, counters and histograms by what came since the scrape before."""

    def __init__(self, now: MetricsSample, before: MetricsSample | None) -> None:
        self.now = now
        self.before = before
        self.seconds = now.at - before.at if before is not None else 0.0

    def since(self, name: str) -> float:
        """How much a counter grew; since its start where nothing is known of before, or where it began anew."""
        new, old = self.now.total(name), self.before.total(name) if self.before is not None else 0.0
        return new - old if new >= old else new

    def rate(self, name: str) -> float:
        return self.since(name) / self.seconds if self.seconds > 0 else 0.0

    def share(self, part: str, whole: str) -> float | None:
        """Of what came lately, or of all where nothing did."""
        if lately := self.since(whole):
            return self.since(part) / lately
        return self.now.total(part) / total if (total := self.now.total(whole)) else None

    def quantiles(self, name: str) -> list[float | None]:
        """Seconds: median, 90th and 99th percentile of what came lately, or of all where nothing did."""
        buckets = _buckets(self.now, name)
        if self.before is not None:
            old = dict(_buckets(self.before, name))
            lately = [(bound, count - old.get(bound, 0.0)) for bound, count in buckets]
            if lately and lately[-1][1] > 0:
                buckets = lately
        return [quantile(buckets, q) for q in (0.5, 0.9, 0.99)]


def _buckets(scrape: MetricsSample, name: str) -> list[tuple[float, float]]:
    return sorted((float(bound), count) for bound, count in scrape.by(f"{name}_bucket", "le").items())


def lines(view: View) -> Iterator[str]:
    """The whole screen."""
    now = view.now
    if not now.total("pageant_scheduler_up"):
        yield click.style("no scheduler answers", fg="red", bold=True)
    members = now.by("pageant_members", "member") | {"scheduler": now.total("pageant_scheduler_up")}
    yield "  ".join(f"{service} {members.get(service, 0):.0f}" for service in SERVICES)
    yield ""
    usage = now.total("vllm:kv_cache_usage_perc")
    running, waiting = now.total("vllm:num_requests_running"), now.total("vllm:num_requests_waiting")
    streams = now.total("pageant_gateway_open_streams")
    yield f"running {running:>6.0f}   waiting {waiting:>6.0f}   open streams here {streams:>6.0f}"
    yield f"KV cache {bar(usage)} {100 * usage:5.1f} %   prefix hits {percent(view.share(*HITS))}   {acceptance(view)}"
    yield (
        f"tokens/s {view.rate('vllm:generation_tokens_total'):>9.1f} out "
        f"{view.rate('vllm:prompt_tokens_total'):>9.1f} in   "
        f"requests/s {view.rate('vllm:request_success_total'):>7.2f}   "
        f"preemptions {now.total('vllm:num_preemptions_total'):.0f}"
    )
    yield ""
    rows = [[name, *(seconds(value) for value in view.quantiles(metric))] for name, metric in QUANTILES]
    yield aligned(["", "median", "90th", "99th"], rows)
    yield ""
    yield aligned(["worker", "running", "KV used", "cached", "blocks", "steps/s"], list(worker_rows(view)))


HITS = ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
ACCEPTED = ("vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_draft_tokens_total")


def worker_rows(view: View) -> Iterator[list[str]]:
    names = ("requests_running", "kv_blocks", "kv_blocks_free", "kv_blocks_cached")
    columns = [view.now.by(f"pageant_worker_{name}", "worker") for name in names]
    steps = view.now.by("pageant_worker_steps_total", "worker")
    old = view.before.by("pageant_worker_steps_total", "worker") if view.before is not None else {}
    for worker in sorted(columns[1]):
        running, blocks, free, cached = (column.get(worker, 0.0) for column in columns)
        rate = (steps.get(worker, 0.0) - old[worker]) / view.seconds if worker in old and view.seconds else 0.0
        used = 100 * (blocks - free - cached) / blocks if blocks else 0.0
        yield [worker, f"{running:.0f}", f"{used:.1f} %", f"{cached:.0f}", f"{blocks:.0f}", f"{rate:.1f}"]


def acceptance(view: View) -> str:
    share = view.share(*ACCEPTED)
    return f"drafts accepted {percent(share)}" if share is not None else "no drafts"


def percent(share: float | None) -> str:
    return f"{100 * share:5.1f} %" if share is not None else "    -"


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    if value >= 10:
        return f"{value:.2f} s"
    return f"{1000 * value:.1f} ms" if value >= 0.001 else f"{1000 * value:.2f} ms"


def bar(share: float) -> str:
    full = round(BAR * min(1.0, max(0.0, share)))
    return "█" * full + "░" * (BAR - full)


class MetricsReader:
    """Reads again and again; a key that is asked for at the terminal is kept."""

    def __init__(self, url: str, key: str, *, ask: Callable[[], str] | None) -> None:
        self._url, self._key, self._ask = url, key, ask

    def read(self) -> MetricsSample:
        """Raises OSError where no server answers, or where the key is refused and no terminal can ask for another."""
        headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
        try:
            with urllib.request.urlopen(urllib.request.Request(self._url, headers=headers), timeout=TIMEOUT) as answer:
                return MetricsSample(answer.read().decode(), time.monotonic())
        except urllib.error.HTTPError as error:
            error.close()  # it holds the connection
            if error.code != HTTPStatus.UNAUTHORIZED or self._ask is None:
                raise
        self._key, self._ask = self._ask(), None  # a second refusal is final
        return self.read()


def ask_key() -> str:
    return str(click.prompt("the gateway asks for an API key", hide_input=True, err=True))


def watch(read: Callable[[], MetricsSample], interval: float, count: int | None, *, clear: bool) -> None:
    """Show the state every `interval` seconds, `count` times or without end."""
    before: MetricsSample | None = None
    for shown in itertools.count(1):
        now = read()
        text = "\n".join(lines(View(now, before)))
        click.echo(f"{CLEAR if clear else ''}{text}")
        if shown == count:
            return
        before = now
        time.sleep(interval)


@click.command("top", cls=SectionedCommand)
@click.option(
    "--url",
    default="http://127.0.0.1:8000/metrics",
    envvar="PAGEANT_METRICS_URL",
    show_default=True,
    help="Where the gateway shows its metrics.",
)
@click.option("--api-key", default="", envvar="PAGEANT_API_KEY", help="A key, if the gateway asks for one.")
@click.option(
    "--interval", type=click.FloatRange(min=0.1), default=1.0, show_default=True, help="Seconds between two looks."
)
@click.option("--once", is_flag=True, help="Show the state once, without clearing the screen.")
def top(url: str, api_key: str, interval: float, once: bool) -> None:
    """Watch a deployment: services, queue, KV use, hit rate, tokens per second, latencies, acceptance."""
    if not url.startswith(("http://", "https://")):
        raise click.ClickException(f"{url} is no http address")
    reader = MetricsReader(url, api_key, ask=ask_key if sys.stdin.isatty() and sys.stderr.isatty() else None)
    try:
        watch(reader.read, interval, 1 if once else None, clear=sys.stdout.isatty() and not once)
    except urllib.error.HTTPError as error:
        raise click.ClickException(
            f"{url} answers {error.code} {error.reason}{KEY_HINT.get(error.code, '')}"
        ) from error
    except OSError as error:
        raise click.ClickException(f"nothing answers at {url}: {error}") from error
