"""A real control plane on loopback, without a kubelet: `python -m k8s.tests.control_plane up | down`.

etcd, the API server, the controllers and the scheduler; what they keep lies in `build/control-plane`. `up` prints the
KUBECONFIG to use. Nodes are written down, not run: `k8s.tests.nodes` plays them. There is no network of pods, so
NetworkPolicies are stored and validated, and not enforced.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from backends.servers import (
    HOST,
    BackendError,
    Cluster,
    MissingToolError,
    Server,
    free_ports,
    remember,
    remembered,
    start_all,
    undone_on_error,
)
from k8s.tests import binaries

NAME = "control-plane"
KUBECONFIG = "admin.kubeconfig"
METRICS = "lag-metrics"
"""The Service, in kube-system, behind which external metrics may be served: `pki/metrics.crt` is its certificate."""
_FOLDER = Path(__file__).resolve().parents[2] / "build" / NAME
_START_SECONDS_MAX = 120.0
_COMMAND_SECONDS_MAX = 60.0
_SERVICES = "10.96.0.0/16"
# Who calls the API server: the name and the group in a certificate.
_CALLERS = {
    "admin": ("admin", "system:masters"),
    "controllers": ("system:kube-controller-manager", "starling"),
    "scheduler": ("system:kube-scheduler", "starling"),
}


def start(folder: Path, nodes: int = 1, *, bound: bool = False) -> Cluster:
    """See `backends.servers`; `nodes` counts API servers, and is 1. Raises MissingToolError when nothing is built."""
    assert nodes == 1
    if not binaries.control_plane_is_there():
        raise MissingToolError("No control plane is built: python -m k8s.tests.binaries (half an hour, once)")
    folder.mkdir(parents=True)
    client, peer, api, controllers, scheduler = free_ports(5)
    servers: list[Server] = []
    with undone_on_error(folder, servers):
        _certificates(folder)
        for caller in _CALLERS:
            _kubeconfig(folder, caller, api)
        servers += [
            Server("etcd", _etcd(folder, client, peer), folder / "etcd", bound=bound),
            Server("kube-apiserver", _api_server(folder, client, api), folder / "api", bound=bound),
        ]
        start_all(servers)
        servers[1].await_that(lambda: _answers(folder), _START_SECONDS_MAX)
        others = [
            Server("kube-controller-manager", _controllers(folder, controllers), folder / "controllers", bound=bound),
            Server("kube-scheduler", _scheduler(folder, scheduler), folder / "scheduler", bound=bound),
        ]
        servers += others
        start_all(others)
        others[0].await_that(lambda: _works(folder), _START_SECONDS_MAX)
    environment = {"KUBECONFIG": str(folder / KUBECONFIG)}
    return Cluster(NAME, folder, 1, [f"{HOST}:{api}"], environment, servers)


def kubectl(kubeconfig: Path, *arguments: str, told: str = "") -> str:
    """What it prints. Raises BackendError with what it complains of."""
    command = (str(binaries.FOLDER / "kubectl"), f"--kubeconfig={kubeconfig}", *arguments)
    ran = subprocess.run(command, input=told, capture_output=True, text=True, timeout=_COMMAND_SECONDS_MAX, check=False)
    if ran.returncode:
        raise BackendError(f"kubectl {' '.join(arguments)}: {ran.stderr.strip()}")
    return ran.stdout


def _answers(folder: Path) -> bool:
    try:
        return kubectl(folder / KUBECONFIG, "get", "--raw", "/readyz") == "ok"
    except BackendError:
        return False


def _works(folder: Path) -> bool:
    """The controllers have made what each namespace gets."""
    try:
        return bool(kubectl(folder / KUBECONFIG, "get", "serviceaccount", "default", "--output=name"))
    except BackendError:
        return False


# ---- Certificates ------------------------------------------------------------------------------------


def _certificates(folder: Path) -> None:
    (folder / "pki").mkdir()
    _openssl(folder, *("req", "-x509", *_new_key("ca"), "-days", "365", "-subj", "/CN=ca", "-out", "ca.crt"))
    _signed(folder, "api", "kube-apiserver", "starling", f"subjectAltName=DNS:localhost,IP:{HOST},IP:10.96.0.1\n")
    # The one whom the API server is, towards what is aggregated with it.
    _signed(folder, "proxy", "front-proxy-client", "starling")
    _signed(folder, "metrics", METRICS, "starling", f"subjectAltName=DNS:{METRICS}.kube-system.svc\n")
    for caller, (name, group) in _CALLERS.items():
        _signed(folder, caller, name, group)
    _openssl(folder, "genrsa", "-out", "accounts.key", "2048")
    _openssl(folder, "rsa", "-in", "accounts.key", "-pubout", "-out", "accounts.pub")


def _new_key(name: str) -> Sequence[str]:
    return ("-newkey", "rsa:2048", "-nodes", "-keyout", f"{name}.key")


def _signed(folder: Path, file: str, name: str, group: str, more: str = "") -> None:
    (folder / "pki" / f"{file}.ext").write_text(f"extendedKeyUsage=serverAuth,clientAuth\n{more}")
    _openssl(folder, "req", *_new_key(file), "-subj", f"/O={group}/CN={name}", "-out", f"{file}.csr")
    by = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "365", "-extfile", f"{file}.ext")
    _openssl(folder, "x509", "-req", "-in", f"{file}.csr", *by, "-out", f"{file}.crt")


def _openssl(folder: Path, *arguments: str) -> None:
    ran = subprocess.run(
        ("openssl", *arguments), cwd=folder / "pki", capture_output=True, text=True, timeout=60, check=False
    )
    if ran.returncode:
        raise BackendError(f"openssl {' '.join(arguments)}: {ran.stderr.strip()}")


def _kubeconfig(folder: Path, caller: str, port: int) -> None:
    pki = folder / "pki"
    (folder / f"{caller}.kubeconfig").write_text(f"""\
apiVersion: v1
kind: Config
clusters: [{{name: here, cluster: {{server: "https://{HOST}:{port}", certificate-authority: "{pki}/ca.crt"}}}}]
users: [{{name: me, user: {{client-certificate: "{pki}/{caller}.crt", client-key: "{pki}/{caller}.key"}}}}]
contexts: [{{name: here, context: {{cluster: here, user: me}}}}]
current-context: here
""")


# ---- Servers -----------------------------------------------------------------------------------------


def _etcd(folder: Path, client: int, peer: int) -> Sequence[str]:
    return (
        *(str(binaries.FOLDER / "etcd"), f"--data-dir={folder}/etcd/data", "--log-level=warn", "--unsafe-no-fsync"),
        *(f"--listen-client-urls=http://{HOST}:{client}", f"--advertise-client-urls=http://{HOST}:{client}"),
        *(f"--listen-peer-urls=http://{HOST}:{peer}", f"--initial-advertise-peer-urls=http://{HOST}:{peer}"),
        f"--initial-cluster=default=http://{HOST}:{peer}",
    )


def _api_server(folder: Path, etcd: int, port: int) -> Sequence[str]:
    pki = folder / "pki"
    return (
        *(str(binaries.FOLDER / "kube-apiserver"), f"--etcd-servers=http://{HOST}:{etcd}"),
        # Not where it is: it wouldn't take a loopback address, and nobody looks it up.
        *(f"--bind-address={HOST}", f"--secure-port={port}", "--advertise-address=192.0.2.1"),
        *("--endpoint-reconciler-type=none", f"--service-cluster-ip-range={_SERVICES}"),
        *("--authorization-mode=Node,RBAC", "--allow-privileged=true", f"--client-ca-file={pki}/ca.crt"),
        *(f"--tls-cert-file={pki}/api.crt", f"--tls-private-key-file={pki}/api.key"),
        *("--service-account-issuer=https://kubernetes.default.svc", f"--service-account-key-file={pki}/accounts.pub"),
        f"--service-account-signing-key-file={pki}/accounts.key",
        *(f"--requestheader-client-ca-file={pki}/ca.crt", "--requestheader-allowed-names=front-proxy-client"),
        *("--requestheader-username-headers=X-Remote-User", "--requestheader-group-headers=X-Remote-Group"),
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        *(f"--proxy-client-cert-file={pki}/proxy.crt", f"--proxy-client-key-file={pki}/proxy.key"),
    )


def _controllers(folder: Path, port: int) -> Sequence[str]:
    config, pki = folder / "controllers.kubeconfig", folder / "pki"
    return (
        *(str(binaries.FOLDER / "kube-controller-manager"), f"--kubeconfig={config}"),
        *(f"--authentication-kubeconfig={config}", f"--authorization-kubeconfig={config}", "--leader-elect=false"),
        *(f"--bind-address={HOST}", f"--secure-port={port}", "--use-service-account-credentials=true"),
        *(f"--service-account-private-key-file={pki}/accounts.key", f"--root-ca-file={pki}/ca.crt"),
        # Nodes have no kubelet that would renew a lease.
        "--controllers=*,-node-lifecycle-controller",
        *("--horizontal-pod-autoscaler-sync-period=2s", "--horizontal-pod-autoscaler-initial-readiness-delay=1s"),
    )


def _scheduler(folder: Path, port: int) -> Sequence[str]:
    config = folder / "scheduler.kubeconfig"
    return (
        *(str(binaries.FOLDER / "kube-scheduler"), f"--kubeconfig={config}", "--leader-elect=false"),
        *(f"--authentication-kubeconfig={config}", f"--authorization-kubeconfig={config}"),
        *(f"--bind-address={HOST}", f"--secure-port={port}"),
    )


def main(arguments: Sequence[str]) -> int:
    """The command."""
    if arguments not in (["up"], ["down"]):
        print("usage: python -m k8s.tests.control_plane up | down", file=sys.stderr)
        return 2
    try:
        remembered(_FOLDER).stop()
        if arguments == ["up"]:
            cluster = start(_FOLDER)
            remember(cluster)
            print(f"export KUBECONFIG={cluster.environment['KUBECONFIG']}")
    except BackendError as error:
        print(f"control_plane: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
