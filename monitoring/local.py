"""`make dashboards`: Prometheus beside `make run`, with the rules; until Ctrl-C. It must be installed (on Debian:
apt-get install prometheus)."""

import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from launcher.data_folder import DEFAULT, VARIABLE, DataFolder

ROOT = Path(__file__).resolve().parents[1]
ADDRESS = "127.0.0.1:9090"


def configure(folder: Path, metrics: Mapping[str, str], every: str = "5s") -> list[str]:
    """Write Prometheus's configuration into a folder; returns the command that runs it there, but for its address."""
    jobs = [{"targets": [address], "labels": {"process": name}} for name, address in metrics.items()]
    content = {
        "global": {"scrape_interval": every, "evaluation_interval": every},
        "rule_files": [str(ROOT / "monitoring/rules.yaml")],
        "scrape_configs": [{"job_name": "starling", "static_configs": jobs}],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prometheus.yml").write_text(json.dumps(content, indent=2))  # JSON is YAML, too.
    return ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]


def main() -> int:
    """Becomes Prometheus; returns the exit status where it can't."""
    if not shutil.which("prometheus"):
        print("Prometheus isn't installed (on Debian: apt-get install prometheus)", file=sys.stderr)
        return 1
    mesh = DataFolder(os.environ.get(VARIABLE, DEFAULT)).read_mesh()
    if mesh is None:
        print("no mesh runs: start it with 'make run'", file=sys.stderr)
        return 1
    command = configure(ROOT / "build/prometheus", mesh.metrics)
    print(f"Prometheus: http://{ADDRESS}/ (alerts: /alerts); dashboards to import into Grafana: monitoring/grafana/")
    sys.stdout.flush()
    os.execvp(command[0], [*command, f"--web.listen-address={ADDRESS}", "--log.level=warn"])
    raise AssertionError("exec doesn't return")


if __name__ == "__main__":
    sys.exit(main())
