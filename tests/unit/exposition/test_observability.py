"""What the compose profile `observability` is provisioned with: it asks for metrics that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "observability"
DOCUMENTED = re.compile(r"^\| `((?:vllm:|pageant_)[a-z0-9_]+)` \| (gauge|counter|histogram) ", re.MULTILINE)


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    kinds = dict(DOCUMENTED.findall((ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")))
    dashboard = json.loads((FOLDER / "grafana" / "dashboards" / "pageant.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) > 20
    for query in queries:
        for name in re.findall(r"(?:vllm:|pageant_)[a-z0-9_]+", query):
            bare = name.removesuffix("_bucket")
            assert bare in kinds, name
            assert (kinds[bare] == "histogram") == name.endswith("_bucket")
            assert kinds[bare] != "counter" or f"rate({name}" in query


def test_panels_do_not_overlap() -> None:
    dashboard = json.loads((FOLDER / "grafana" / "dashboards" / "pageant.json").read_text(encoding="utf-8"))
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(places) == len(set(places)) and all(panel["gridPos"]["w"] == 12 for panel in dashboard["panels"])
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(places)


def test_prometheus_scrapes_the_services_of_compose() -> None:
    scraped = (FOLDER / "prometheus.yml").read_text(encoding="utf-8")
    compose = (ROOT / "compose.yaml").read_text(encoding="utf-8")
    for service in ("tokenizer", "scheduler", "worker", "draft", "detokenizer", "door"):
        assert re.search(rf"^  {service}:$", compose, re.MULTILINE) and service in scraped
    assert "PAGEANT_METRICS_PORT: ${PAGEANT_METRICS_PORT:-9090}" in compose and "port: 9090" in scraped
