"""Plays the nodes of a control plane that has none: pods that are bound become Ready, deleted ones go.

A pod whose name label is in `real` becomes a process here, `python -m` what its args say, with the environment that the
kubelet would give it. It is Ready when its gRPC health says SERVING; it gets SIGTERM when it is deleted, and SIGKILL
when its termination grace is over. Of the others only the status is written.
"""

import base64
import datetime
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import requests
from grpc_health.v1 import health_pb2, health_pb2_grpc

from backends.servers import HOST, free_ports

Object = dict[str, Any]
NODES, PODS_A_NODE = 3, 110
_CALL_SECONDS_MAX = 10.0
_HEALTH_SECONDS_MAX = 0.5
_NAME = "app.kubernetes.io/name"


class Api:
    """The API server, as the one who may do everything. Methods raise requests.HTTPError."""

    def __init__(self, folder: Path, address: str) -> None:
        self._url = f"https://{address}"
        self._session = requests.Session()
        self._session.verify = str(folder / "pki/ca.crt")
        self._session.trust_env = False
        self._session.cert = (str(folder / "pki/admin.crt"), str(folder / "pki/admin.key"))

    def call(self, method: str, path: str, body: Object | None = None, kind: str = "application/json") -> Object:
        """What it answers."""
        headers = {"Content-Type": kind}
        answer = self._session.request(method, self._url + path, json=body, headers=headers, timeout=_CALL_SECONDS_MAX)
        if not answer.ok:
            raise requests.HTTPError(answer.text, response=answer)
        told: Object = answer.json()
        return told

    def items(self, path: str) -> list[Object]:
        """What a list has."""
        return list(self.call("GET", path)["items"])


@dataclass(slots=True)
class _Process:
    process: "subprocess.Popen[bytes]"
    address: str
    kill_at: float = 0.0
    ready: bool = False


@dataclass(slots=True)
class Nodes:
    """`step()` is to be called again and again. `overrides`: variables that processes here get instead of the pod's."""

    api: Api
    folder: Path
    real: frozenset[str] = frozenset()
    overrides: Mapping[str, str] = field(default_factory=dict)
    exits: dict[str, int] = field(default_factory=dict)
    """How each process that ended did."""
    _processes: dict[str, _Process] = field(default_factory=dict)
    _addresses: int = 0

    def register(self) -> None:
        """Write the nodes down, one in each of three zones."""
        for number in range(NODES):
            name = f"node-{number}"
            zone = {"topology.kubernetes.io/zone": f"zone-{number}", "kubernetes.io/hostname": name}
            self.api.call("POST", "/api/v1/nodes", {"metadata": {"name": name, "labels": zone}})
            room = {"cpu": "64", "memory": "256Gi", "pods": str(PODS_A_NODE)}
            status = {"allocatable": room, "capacity": room, "conditions": [_condition("Ready")]}
            self._status(f"/api/v1/nodes/{name}", status)
            # The API server gave it when the node came; the controller that takes it away isn't here.
            self._patch(f"/api/v1/nodes/{name}", {"spec": {"taints": None}})

    def step(self) -> None:
        """One look at all pods."""
        for pod in self.api.items("/api/v1/pods"):
            try:
                self._look_at(pod)
            except requests.HTTPError as error:
                # It changed, or went, since it was looked at: the next look will see.
                if error.response.status_code not in {404, 409}:
                    raise

    def _look_at(self, pod: Object) -> None:
        metadata = pod["metadata"]
        if "deletionTimestamp" in metadata:
            if self._ended(metadata["uid"], metadata["deletionGracePeriodSeconds"]):
                self.api.call("DELETE", _path(pod), {"gracePeriodSeconds": 0})
        elif pod["spec"].get("nodeName"):
            if metadata["labels"].get(_NAME) in self.real:
                self._run(pod)
            elif pod["status"]["phase"] == "Pending":
                self._addresses += 1
                self._is_ready(pod, f"10.244.{self._addresses >> 8}.{self._addresses & 255}")

    def close(self) -> None:
        """Kill what still runs."""
        for one in self._processes.values():
            one.process.kill()
            one.process.wait()

    def _run(self, pod: Object) -> None:
        uid = pod["metadata"]["uid"]
        if uid not in self._processes:
            self._processes[uid] = self._started(pod)
        one = self._processes[uid]
        if not one.ready and _serves(one.address):
            one.ready = True
            self._is_ready(pod, HOST)

    def _started(self, pod: Object) -> _Process:
        (container,) = pod["spec"]["containers"]
        address = f"{HOST}:{free_ports(1)[0]}"
        told = {**self._environment(pod["metadata"]["namespace"], container), **self.overrides}
        # All pods share this host's ports.
        told |= {
            "STARLING_LISTEN": address,
            "STARLING_METRICS_LISTEN": "",
            "PATH": os.environ["PATH"],
            "HOSTNAME": pod["metadata"]["name"],
        }
        with (self.folder / f"{pod['metadata']['name']}.log").open("ab") as log:
            command = (sys.executable, "-m", *container["args"])
            process = subprocess.Popen(command, env=told, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        return _Process(process, address)

    def _environment(self, namespace: str, container: Object) -> dict[str, str]:
        told: dict[str, str] = {}
        for each in container.get("envFrom", ()):
            ((how, at),) = each.items()
            kind = {"configMapRef": "configmaps", "secretRef": "secrets"}[how]
            data = self.api.call("GET", f"/api/v1/namespaces/{namespace}/{kind}/{at['name']}")["data"]
            secret = kind == "secrets"
            told |= {key: base64.b64decode(value).decode() if secret else value for key, value in data.items()}
        return told | {each["name"]: each["value"] for each in container.get("env", ())}

    def _ended(self, uid: str, grace_seconds: float) -> bool:
        one = self._processes.get(uid)
        if one is None:
            return True
        if not one.kill_at:
            one.process.send_signal(signal.SIGTERM)
            one.kill_at = time.monotonic() + grace_seconds
        if one.process.poll() is None:
            if time.monotonic() > one.kill_at:
                one.process.kill()
            return False
        self.exits[uid] = one.process.returncode
        del self._processes[uid]
        return True

    def _is_ready(self, pod: Object, address: str) -> None:
        conditions = [_condition(one) for one in ("PodScheduled", "Initialized", "ContainersReady", "Ready")]
        running = {"running": {"startedAt": _now()}}
        states = [
            {
                "name": one["name"],
                "image": one["image"],
                "imageID": "",
                "ready": True,
                "started": True,
                "restartCount": 0,
            }
            | {"state": running}
            for one in pod["spec"]["containers"]
        ]
        told = {"phase": "Running", "startTime": _now(), "podIP": address, "podIPs": [{"ip": address}]}
        self._status(_path(pod), told | {"conditions": conditions, "containerStatuses": states})

    def _status(self, path: str, status: Object) -> None:
        self._patch(f"{path}/status", {"status": status})

    def _patch(self, path: str, change: Object) -> None:
        self.api.call("PATCH", path, change, "application/merge-patch+json")


def _path(pod: Object) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


def _condition(kind: str) -> Object:
    return {"type": kind, "status": "True", "lastTransitionTime": _now(), "reason": "Played"}


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _serves(address: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            told = stub.Check(health_pb2.HealthCheckRequest(), timeout=_HEALTH_SECONDS_MAX)
        except grpc.RpcError:
            return False
    return bool(told.status == health_pb2.HealthCheckResponse.SERVING)
