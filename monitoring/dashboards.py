"""Grafana's dashboards, made from the table below: `python -m monitoring.dashboards` writes `monitoring/grafana/`.

Each panel is a title, a unit of Grafana's, and a query with the legend of its lines. Tests hold the queries against the
declared metrics, and ask them of a Prometheus that scraped a running mesh.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("grafana")
_HOME = 'method="starling.timeline.v1.TimelineService/ListHomeTimeline"'
_POST = 'method="starling.tweet.v1.TweetService/CreateTweet"'


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph. `unit` as Grafana names it: s, short, ops, percentunit, bytes."""

    title: str
    unit: str
    query: str
    legend: str = ""


def _rate(name: str, by: str, more: str = "") -> str:
    return f"sum by ({by}) (rate({name}{more}[$__rate_interval]))"


def _quantile(share: float, name: str, more: str = "", by: str = "le") -> str:
    return f"histogram_quantile({share}, sum by ({by}) (rate({name}_bucket{more}[$__rate_interval])))"


DASHBOARDS: dict[str, list[Panel]] = {
    "overview": [
        Panel("Processes", "short", "sum by (process) (up)", "{{process}}"),
        Panel("Home reads that fail (SLO: 0.01 %)", "percentunit", "starling:home_read_errors:ratio5m"),
        Panel("Home reads over 200 ms (SLO: 1 %)", "percentunit", "starling:home_read_slow:ratio5m"),
        Panel("Posts that fail (SLO: 0.1 %)", "percentunit", "starling:post_errors:ratio5m"),
        Panel("Posts over 500 ms (SLO: 1 %)", "percentunit", "starling:post_slow:ratio5m"),
        Panel("Deliveries after a minute (SLO: 1 %)", "percentunit", "starling:delivery_late:ratio5m"),
        Panel("Fan-out is behind", "s", "starling:fanout_lag_seconds:max", "{{topic}}"),
        Panel("Homes that weren't exact", "short", "sum(increase(starling_timeline_mismatches_total[1h]))"),
        Panel("Calls", "ops", _rate("starling_rpc_seconds_count", "method"), "{{method}}"),
        Panel("Calls that don't end well", "ops", _rate("starling_rpc_seconds_count", "method, code"), "{{method}} {{code}}"),
        Panel("Calls in flight", "short", "sum by (process) (starling_calls_in_flight)", "{{process}}"),
        Panel("Event loop late, P99", "s", _quantile(0.99, "starling_event_loop_delay_seconds", by="le, process"), "{{process}}"),
        Panel("Requests to the edge", "ops", _rate("starling_edge_request_seconds_count", "rpc, status"), "{{rpc}} {{status}}"),
        Panel("Live streams at the edge", "short", "sum(starling_edge_streams)"),
        Panel("Processor", "percentunit", _rate("process_cpu_seconds_total", "process"), "{{process}}"),
        Panel("Memory", "bytes", "sum by (process) (process_resident_memory_bytes)", "{{process}}"),
    ],
    "fanout": [
        Panel("Behind, by topic", "s", "starling:fanout_lag_seconds:max", "{{topic}}"),
        Panel("Records waiting", "short", "sum by (topic) (max by (topic, partition) (starling_fanout_lag_messages))", "{{topic}}"),
        Panel("Records waiting, by partition", "short", "max by (topic, partition) (starling_fanout_lag_messages)", "{{topic}} {{partition}}"),
        Panel("Deliveries", "ops", _rate("starling_deliveries_total", "process"), "{{process}}"),
        Panel("Deliveries into lists", "ops", _rate("starling_deliveries_to_lists_total", "process"), "{{process}}"),
        Panel("From post to delivery, P50", "s", _quantile(0.5, "starling_delivery_delay_seconds")),
        Panel("From post to delivery, P99", "s", _quantile(0.99, "starling_delivery_delay_seconds")),
        Panel("Followers a push, P50", "short", _quantile(0.5, "starling_push_lists")),
        Panel("Records acknowledged", "ops", _rate("starling_fanout_events_total", "process"), "{{process}}"),
        Panel("Tried again", "ops", _rate("starling_fanout_retries_total", "process"), "{{process}}"),
        Panel("Dead letters", "short", "sum(increase(starling_dead_letters_total[1h]))"),
        Panel("Pull threshold in force", "short", "min(starling_pull_threshold)"),
        Panel("Stage of pressure", "short", "max(starling_pressure_stage)"),
        Panel("Authors that change modes", "ops", "sum(rate(starling_mode_moves_total[$__rate_interval]))"),
        Panel("Buckets drained", "ops", "sum(rate(starling_drained_buckets_total[$__rate_interval]))"),
        Panel("Outbox", "short", "max(starling_outbox_depth)"),
        Panel("Events published", "ops", "sum(rate(starling_events_published_total[$__rate_interval]))"),
        Panel("Relay waits", "ops", "sum(rate(starling_relay_retries_total[$__rate_interval]))"),
        Panel("Hot tweets", "short", "max(starling_hot_tweets)"),
    ],
    "timelines": [
        Panel("Home reads, P50", "s", _quantile(0.5, "starling_rpc_seconds", f"{{{_HOME}}}")),
        Panel("Home reads, P99", "s", _quantile(0.99, "starling_rpc_seconds", f"{{{_HOME}}}")),
        Panel("Posts, P99", "s", _quantile(0.99, "starling_rpc_seconds", f"{{{_POST}}}")),
        Panel("What pages are read from", "ops", _rate("starling_home_reads_total", "source"), "{{source}}"),
        Panel("Pages that go on below a list", "ops", "sum(rate(starling_fall_throughs_total[$__rate_interval]))"),
        Panel("Lists made behind reads", "ops", _rate("starling_lists_made_total", "how"), "{{how}}"),
        Panel("Pulled authors a page, P99", "short", _quantile(0.99, "starling_pull_width")),
        Panel("Bodies not in the cache", "ops", "sum(rate(starling_bodies_missed_total[$__rate_interval]))"),
        Panel("Authors known as pulled", "short", "max(starling_pulled_authors)"),
        Panel("Homes looked at by the sampler", "short", "sum(increase(starling_timeline_samples_total[1h]))"),
        Panel("Homes that weren't exact", "short", "sum(increase(starling_timeline_mismatches_total[1h]))"),
    ],
    "stores": [
        Panel("Valkey doesn't answer, or refuses", "ops", _rate("starling_cache_errors_total", "process"), "{{process}}"),
        Panel("graph_svc's answers, P99", "s", _quantile(0.99, "starling_rpc_seconds", '{process="graph_svc"}', "le, method"), "{{method}}"),
        Panel("tweet_svc's answers, P99", "s", _quantile(0.99, "starling_rpc_seconds", '{process="tweet_svc"}', "le, method"), "{{method}}"),
        Panel("Outbox", "short", "max(starling_outbox_depth)"),
        Panel("Open files", "short", "sum by (process) (process_open_fds)", "{{process}}"),
    ],
}  # fmt: skip


def dashboard(name: str, panels: list[Panel]) -> dict[str, Any]:
    """As Grafana wants it: two panels in a row."""
    return {
        "uid": f"starling-{name}",
        "title": f"Starling: {name}",
        "schemaVersion": 39,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "tags": ["starling"],
        "panels": [
            {
                "id": number + 1,
                "type": "timeseries",
                "title": panel.title,
                "datasource": {"type": "prometheus", "uid": "prometheus"},
                "gridPos": {"h": 8, "w": 12, "x": 12 * (number % 2), "y": 8 * (number // 2)},
                "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
                "targets": [{"refId": "A", "expr": panel.query, "legendFormat": panel.legend or panel.title}],
            }
            for number, panel in enumerate(panels)
        ],
    }


def rendered() -> dict[str, str]:
    """The files by name."""
    return {f"{name}.json": json.dumps(dashboard(name, panels), indent=1) + "\n" for name, panels in DASHBOARDS.items()}


if __name__ == "__main__":
    for file, text in rendered().items():
        (FOLDER / file).write_text(text)
