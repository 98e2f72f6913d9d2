"""Serves lag as external metrics, for a HorizontalPodAutoscaler: what an adapter for Prometheus does in a cluster."""

import json
import ssl
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from backends.servers import HOST
from k8s.tests.control_plane import METRICS

_GROUP, _VERSION = "external.metrics.k8s.io", "external.metrics.k8s.io/v1beta1"
METRIC = "kafka_consumergroup_lag"
_STALE_SECONDS = 15.0


class LagMetrics:
    """An aggregated API server on loopback. `tell` says what it answers; what is older than some seconds it leaves out,
    since an autoscaler must know that it doesn't know."""

    def __init__(self, certificate: Path, key: Path, port: int) -> None:
        self._lag: Mapping[str, int] = {}
        self._told = 0.0
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self._server = ThreadingHTTPServer((HOST, port), self._handler())
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def tell(self, lag: Mapping[str, int]) -> None:
        """Messages by topic."""
        self._lag, self._told = lag, time.monotonic()

    def close(self) -> None:
        """Serve no more."""
        self._server.shutdown()
        self._server.server_close()

    def answer(self, url: str) -> dict[str, Any] | None:
        """None: not found."""
        parts = urlsplit(url)
        path = parts.path.strip("/").split("/")
        if parts.path == f"/apis/{_VERSION}":
            resource = {"name": METRIC, "singularName": "", "namespaced": True, "kind": "ExternalMetricValueList"}
            return {"kind": "APIResourceList", "groupVersion": _VERSION, "resources": [resource | {"verbs": ["get"]}]}
        if len(path) != 6 or path[5] != METRIC:
            return None
        selector = parse_qs(parts.query).get("labelSelector", [""])[0]
        wanted = dict(one.split("=", 1) for one in selector.split(",") if "=" in one)
        known = self._lag if time.monotonic() - self._told < _STALE_SECONDS else {}
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        items = [
            {"metricName": METRIC, "metricLabels": {"topic": topic}, "timestamp": now, "value": str(messages)}
            for topic, messages in known.items()
            if wanted == {"topic": topic, "consumergroup": f"fanout-workers.{topic}"}
        ]
        return {"kind": "ExternalMetricValueList", "apiVersion": _VERSION, "metadata": {}, "items": items}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        answer = self.answer

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                body = json.dumps(told if (told := answer(self.path)) is not None else {}).encode()
                self.send_response(404 if told is None else 200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Not on stderr."""

        return Handler


def registration(port: int, authority: bytes) -> list[dict[str, Any]]:
    """What makes the API server ask there. `authority`: base64 of its certificate."""
    service = {"name": METRICS, "namespace": "kube-system"}
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": service,
            "spec": {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": port}]},
        },
        {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": f"v1beta1.{_GROUP}"},
            "spec": {
                "group": _GROUP,
                "version": "v1beta1",
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
                "caBundle": authority.decode(),
                "service": service | {"port": port},
            },
        },
    ]
