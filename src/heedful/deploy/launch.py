"""Applications of a Serve YAML, run until somebody ends it: on a Ray of this process, or on a cluster that is there."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heedful.deploy.settings import DeploySettings, settings_from_args
from heedful.errors import BadParameter, DeployFailed
from heedful.weights.source_names import parse_source

IMPORT_PATH = "heedful.deploy.app:build"


@dataclass(frozen=True)
class Deployed:
    """One application of the file, and where it listens."""

    name: str
    route_prefix: str
    args: Mapping[str, Any]
    host: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}{self.route_prefix.rstrip('/')}"


def read_app(path: Path) -> Deployed:
    """Raises BadParameter for a file that is no Serve YAML with one application of ours."""
    import yaml

    try:
        found = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise BadParameter("app.yaml", f"{path} cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise BadParameter("app.yaml", f"{path} is not YAML: {str(error)[:150]}") from None
    applications = found.get("applications") if isinstance(found, Mapping) else None
    if not isinstance(applications, list) or len(applications) != 1 or not isinstance(applications[0], Mapping):
        raise BadParameter("app.yaml", "must have a list of one under applications", "examples/deploy.yaml is one.")
    one = applications[0]
    if one.get("import_path") != IMPORT_PATH:
        what = f"has import_path {one.get('import_path')!r:.60}, and not {IMPORT_PATH}"
        raise BadParameter("app.yaml", what, "`serve deploy` runs applications of all kinds.")
    args = one.get("args") or {}
    if not isinstance(args, Mapping):
        raise BadParameter("args", "must map names to values")
    settings_from_args(args)
    http = found.get("http_options") or {}
    host, port = http.get("host", "127.0.0.1"), http.get("port", 8000)
    if not isinstance(host, str) or isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535:
        raise BadParameter("http_options", "must have a host, and a port between 1 and 65535")
    return Deployed(str(one.get("name", "heedful")), str(one.get("route_prefix", "/")), args, host, port)


def start(app: Deployed, address: str | None = None) -> None:
    """`address`: of a cluster; None: a Ray of this machine's cores, which ends with this process. Returns when the
    replicas are ready. Raises DeployFailed; on this machine UnknownModel and SourceError for names that are none, and
    BadParameter where it has too few cores."""
    settings = settings_from_args(app.args)
    if address is None:
        for model in settings.models:
            parse_source(model)
        _check_cpus(settings)
    for name in _PATIENCE:
        os.environ.setdefault(name, "60")
    import ray
    from ray import serve
    from ray.exceptions import RayError

    from heedful.deploy.app import build

    if address is None:
        ray.init(include_dashboard=False, configure_logging=False, log_to_driver=False)
    else:
        ray.init(address=address, log_to_driver=False)
    try:
        serve.start(http_options={"host": app.host, "port": app.port})
        serve.run(build(app.args), name=app.name, route_prefix=app.route_prefix)
    except (RayError, RuntimeError, TimeoutError) as error:
        ray.shutdown()
        raise DeployFailed(
            f"{app.name} does not start: {_reason(str(error))}", "Look at Ray's logs for more."
        ) from error


def _check_cpus(settings: DeploySettings) -> None:
    """Ray would wait without end for cores that this machine does not have."""
    count = settings.replicas if settings.autoscaling is None else settings.autoscaling.least
    there = os.cpu_count() or 1
    if count * settings.cpus > there:
        what = (
            f"of {settings.cpus:,} each are {count * settings.cpus:,} for {count:,} replicas, and there are {there:,}"
        )
        raise BadParameter("args.cpus", what, "Ask for fewer, or join a cluster with --address.")


_PATIENCE = ("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S")
"""Serve gives its proxy 5 seconds to start, and starts another one: on a busy machine none ever does."""


def _reason(text: str) -> str:
    """Our own error in what Ray says of a replica's end, else its last line."""
    ours = re.findall(r"heedful\.errors\.\w+: (.+)", text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return str((ours or lines[-1:] or ["no reason is given"])[-1])[:300]


def stop(app: Deployed, *, is_own: bool) -> None:
    """Open answers end first. `is_own`: Ray ends too."""
    import ray
    from ray import serve

    serve.delete(app.name)
    if is_own:
        serve.shutdown()
    ray.shutdown()
