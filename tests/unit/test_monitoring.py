"""Dashboards and alerts ask for metrics that there are; each alert has its runbook; the rules do what they say."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from mesh.metrics import DECLARED, DELAY_SECONDS, RPC_SECONDS
from monitoring.dashboards import DASHBOARDS, FOLDER, rendered

ROOT = Path(__file__).parents[2]
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((ROOT / "monitoring/rules.yaml").read_text())["groups"] for rule in group["rules"]
]
ALERTS = [rule for rule in RULES if "alert" in rule]
QUERIES = [rule["expr"] for rule in RULES] + [panel.query for panels in DASHBOARDS.values() for panel in panels]


def known_series() -> set[str]:
    edge = re.findall(r'Name: "(starling_edge_\w+)"', (ROOT / "edge/metrics.go").read_text())
    assert len(edge) == 3
    return {
        *(series for declared in DECLARED for series in declared.series),
        *(f"{name}{end}" for name in edge for end in ("", "_bucket", "_count", "_sum")),
        *(rule["record"] for rule in RULES if "record" in rule),
    }


def test_queries_ask_for_declared_metrics_only() -> None:
    asked = {name for query in QUERIES for name in re.findall(r"\bstarling[_:][\w:]+", re.sub(r'"[^"]*"', "", query))}
    assert len(asked) > 30
    assert asked - known_series() == set()


def test_each_declared_metric_is_on_a_dashboard() -> None:
    shown = " ".join(QUERIES)
    assert [d.name for d in DECLARED if not any(series in shown for series in d.series)] == []


def test_limits_are_bounds_of_buckets() -> None:
    """Else the query would find nothing, and the alert would never come."""
    bounds = {str(float(bound)) for bound in (*RPC_SECONDS, *DELAY_SECONDS)}
    assert {le for query in QUERIES for le in re.findall(r'le="([^"]+)"', query)} <= bounds


def test_the_dashboards_are_what_the_script_makes() -> None:
    assert {path.name: path.read_text() for path in FOLDER.iterdir()} == rendered()


def test_each_alert_has_a_runbook_and_the_other_way_round() -> None:
    headings = re.findall(r"^## (\w+)$", (ROOT / "docs/runbooks.md").read_text(), re.MULTILINE)
    assert headings == [rule["alert"] for rule in ALERTS]
    for rule in ALERTS:
        assert rule["annotations"]["runbook_url"] == f"docs/runbooks.md#{rule['alert'].lower()}"


def test_each_alert_is_tested_by_promtool() -> None:
    tested = (ROOT / "monitoring/rules_test.yaml").read_text()
    assert [rule["alert"] for rule in ALERTS if f"alertname: {rule['alert']}\n" not in tested] == []


def test_the_rules_do_what_they_say() -> None:
    if not shutil.which("promtool"):
        pytest.skip("no promtool here (on Debian: apt-get install prometheus)")
    done = subprocess.run(
        ["promtool", "test", "rules", "rules_test.yaml"],
        check=False,
        cwd=ROOT / "monitoring",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
