"""Metrics of a running mesh, as Prometheus would see them."""

import urllib.request
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.conftest import RunningMesh

Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def scrape(address: str) -> Samples:
    """All samples of one process, by name and labels."""
    with _DIRECT.open(f"http://{address}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def exemplars(address: str) -> str:
    """The lines that have an example's trace, as OpenMetrics writes them."""
    wanted = urllib.request.Request(f"http://{address}/metrics", headers={"Accept": "application/openmetrics-text"})
    with _DIRECT.open(wanted, timeout=10) as answer:
        return "\n".join(line for line in answer.read().decode().splitlines() if "trace_id" in line)


def scrape_all(mesh: RunningMesh) -> dict[str, Samples]:
    """Of each process by its name."""
    return {name: scrape(address) for name, address in mesh.mesh.metrics.items()}


def total(samples: Samples, name: str, **labels: str) -> float:
    """The sum of a name's samples with at least these labels."""
    return sum(value for (found, has), value in samples.items() if found == name and set(labels.items()) <= has)
