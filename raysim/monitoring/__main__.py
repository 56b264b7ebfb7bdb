"""`python -m raysim.monitoring --out DIR`: what Prometheus and Grafana need to show runs."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import tyro

from raysim.errors import RunError
from raysim.launch import exit_code
from raysim.record import write_text

PLACES = {
    "prometheus.yml": "prometheus.yml",
    "datasource.yml": "grafana/provisioning/datasources/prometheus.yml",
    "dashboards.yml": "grafana/provisioning/dashboards/raysim.yml",
    "raysim.json": "grafana/dashboards/raysim.json",
}
"""Each file of this package, and where it goes in the folder."""


@dataclass(frozen=True)
class Options:
    """Write the configuration of Prometheus, and Grafana's dashboard and provisioning."""

    out: Path | None = None
    """Folder to write to. None prints the dashboard, for Grafana's Import."""
    temp_dir: Path = Path("/tmp/ray")
    """Ray's folder for sessions (ray start --temp-dir); there Ray lists what to read."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 it could not be written, 2 the folder cannot be."""
    options = tyro.cli(Options, args=argv, prog="python -m raysim.monitoring")
    return exit_code(lambda: _act(options))


def _act(options: Options) -> None:
    if options.out is None:
        print(asset("raysim.json"), end="")
        return
    out = options.out.absolute()
    words = {"@TEMP@": str(options.temp_dir.absolute()), "@OUT@": str(out / "grafana")}
    for name, place in PLACES.items():
        text = asset(name)
        for word, value in words.items():
            text = text.replace(f'"{word}', json.dumps(value)[:-1])
        path = out / place
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"--out {options.out}: {error.strerror}; name another folder") from error
        write_text(path, text)
    print(f"""wrote {", ".join(PLACES.values())} to {out}

prometheus --config.file={out}/prometheus.yml --web.listen-address=127.0.0.1:9090
GF_PATHS_PROVISIONING={out}/grafana/provisioning grafana server --homepath /usr/share/grafana

For the charts in Ray's own dashboard also: export RAY_PROMETHEUS_HOST=http://127.0.0.1:9090 \
RAY_GRAFANA_HOST=http://127.0.0.1:3000""")


def asset(name: str) -> str:
    return resources.files("raysim.monitoring").joinpath(name).read_text("utf-8")


if __name__ == "__main__":
    sys.exit(main())
