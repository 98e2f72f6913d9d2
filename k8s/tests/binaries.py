"""What a real control plane is made of, built once from Go modules into a folder outside the project.

`python -m k8s.tests.binaries [kubernetes | keda]` builds what is missing of these, or of both, with a line for each
program; a second run does nothing. Each is about a quarter of an hour of CPU; Go's own caches grow by 12 GB. Exit
status: 0, or 1 with what Go says is wrong.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

KUBERNETES, KEDA = "1.36.3", "2.21.0"
FOLDER = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "starling" / f"kubernetes-{KUBERNETES}"
_ETCD = "go.etcd.io/etcd/server/v3"
_OF_KUBERNETES = {
    "etcd": _ETCD,
    **{name: f"k8s.io/kubernetes/cmd/{name}" for name in ("kubectl", "kube-apiserver")},
    **{name: f"k8s.io/kubernetes/cmd/{name}" for name in ("kube-controller-manager", "kube-scheduler")},
}
_OF_KEDA = {"keda": "./cmd/operator", "keda-adapter": "./cmd/adapter"}
PROGRAMS = (*_OF_KUBERNETES, *_OF_KEDA)
KEDA_CONFIG = FOLDER / "keda-config"
"""KEDA's own CRDs and RBAC."""
_BUILD_SECONDS_MAX = 7_200.0


class BuildError(Exception):
    """Go said no; the message is its own."""


def control_plane_is_there() -> bool:
    """Whether Kubernetes' own programs are built."""
    return all((FOLDER / name).is_file() for name in _OF_KUBERNETES)


def keda_is_there() -> bool:
    """Whether KEDA is, too."""
    return KEDA_CONFIG.is_dir() and all((FOLDER / name).is_file() for name in _OF_KEDA)


def build(what: Sequence[str] = ("kubernetes", "keda")) -> None:
    """Raises BuildError. May be stopped at any time: what is complete stays."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in what:
        programs, sources = {"kubernetes": (_OF_KUBERNETES, _kubernetes), "keda": (_OF_KEDA, _keda)}[name]
        if missing := [name for name in programs if not (FOLDER / name).is_file()]:
            with tempfile.TemporaryDirectory() as scratch:
                home = sources(Path(scratch))
                for program in missing:
                    _build_one(home, program, programs[program])


def _build_one(home: Path, name: str, package: str) -> None:
    number = PROGRAMS.index(name) + 1
    print(f"[{number}/{len(PROGRAMS)}] {name} …", end=" ", flush=True)
    began, stamp = time.monotonic(), "-X k8s.io/component-base/version"
    version = f"{stamp}.gitVersion=v{KUBERNETES} {stamp}.gitMajor=1 {stamp}.gitMinor={KUBERNETES.split('.')[1]}"
    unfinished = FOLDER / f".{name}"
    _go(home, "build", "-trimpath", "-buildvcs=false", "-ldflags", f"-s -w {version}", "-o", str(unfinished), package)
    unfinished.rename(FOLDER / name)
    print(f"{time.monotonic() - began:.0f} s", flush=True)


def _kubernetes(home: Path) -> Path:
    """A module that requires Kubernetes, with the staging modules at the release that belongs to it."""
    downloaded = json.loads(_go(home, "mod", "download", "-json", f"k8s.io/kubernetes@v{KUBERNETES}"))
    told = Path(downloaded["GoMod"]).read_text()
    staging = sorted(set(re.findall(r"^\s*(k8s\.io/\S+) v0\.0\.0\s*$", told, re.MULTILINE)))
    etcd = re.search(rf"^\s*{re.escape(_ETCD)} (\S+)", told, re.MULTILINE)
    if not staging or not etcd:
        raise BuildError(f"k8s.io/kubernetes v{KUBERNETES}: its go.mod isn't as it used to be")
    lines = ["module starling.test/kubernetes", *re.findall(r"^(?:go|godebug) .*$", told, re.MULTILINE)]
    lines += re.findall(r"^godebug \(.*?^\)", told, re.MULTILINE | re.DOTALL)
    lines += [f"require k8s.io/kubernetes v{KUBERNETES}", f"require {_ETCD} {etcd[1]}"]
    lines += [f"replace {name} => {name} v0.{KUBERNETES.partition('.')[2]}" for name in staging]
    (home / "go.mod").write_text("\n".join(lines) + "\n")
    used = "".join(f"import _ {json.dumps(package)}\n" for package in _OF_KUBERNETES.values())
    (home / "used.go").write_text(f"//go:build used\n\npackage used\n\n{used}")
    _go(home, "mod", "tidy")
    return home


def _keda(home: Path) -> Path:
    """KEDA's module as it is: it builds by its own go.mod and go.sum."""
    downloaded = json.loads(_go(home, "mod", "download", "-json", f"github.com/kedacore/keda/v2@v{KEDA}"))
    source = home / "source"
    shutil.copytree(downloaded["Dir"], source, copy_function=shutil.copyfile)
    for folder in (source, *(path for path in source.rglob("*") if path.is_dir())):
        folder.chmod(0o755)
    shutil.rmtree(KEDA_CONFIG, ignore_errors=True)
    shutil.copytree(source / "config", KEDA_CONFIG)
    return source


def _go(home: Path, *arguments: str) -> str:
    environment = os.environ | {"CGO_ENABLED": "0", "GOFLAGS": "-mod=mod", "GOWORK": "off"}
    command: Sequence[str] = ("go", *arguments)
    ran = subprocess.run(
        command, cwd=home, env=environment, capture_output=True, text=True, timeout=_BUILD_SECONDS_MAX, check=False
    )
    if ran.returncode:
        raise BuildError(f"{' '.join(command)}\n{ran.stderr.strip()}")
    return ran.stdout


if __name__ == "__main__":
    asked = sys.argv[1:] or ["kubernetes", "keda"]
    if set(asked) - {"kubernetes", "keda"}:
        sys.exit("usage: python -m k8s.tests.binaries [kubernetes | keda]")
    try:
        build(asked)
    except (BuildError, OSError, subprocess.TimeoutExpired) as error:
        sys.exit(f"binaries: {error}")
    print(f"All is in {FOLDER}")
