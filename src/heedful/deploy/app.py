"""The application that Ray Serve runs: an ingress that speaks our HTTP APIs, and replicas of the server behind it.

In a Serve YAML: import_path: heedful.deploy.app:build, and args as settings.py has them. `heedful deploy` runs it too.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from heedful.deploy.engine_replica import EngineReplica
from heedful.deploy.forwarded import Forwarded, Head
from heedful.deploy.ingress import Ask, Ingress, ReplicaLost
from heedful.deploy.settings import DeploySettings, settings_from_args

ENGINE = "Engine"
HEALTH_PERIOD_S = 5.0
ROUTERS = {"affinity": "AffinityRouter", "random": "RandomRouter"}
"""Other than Serve's own, by the names that settings give them."""


def build(args: Mapping[str, Any]) -> serve.Application:
    """Raises BadParameter, which names the key."""
    settings = settings_from_args(args)
    return _ingress.bind(_engine(settings))


class _Engine:
    """EngineReplica as a deployment."""

    async def __init__(self, settings: DeploySettings) -> None:  # type: ignore[misc]  # Serve awaits it
        self._replica = EngineReplica(settings, serve.get_replica_context().replica_id.unique_id)
        await self._replica.start()

    async def forward(self, asked: Forwarded) -> AsyncGenerator[Head | bytes, None]:
        async for piece in self._replica.forward(asked):
            yield piece

    def check_health(self) -> None:
        self._replica.check_health()

    async def __del__(self) -> None:
        """Serve awaits it when open answers have ended, or their time is over."""
        await self._replica.close()


def _engine(settings: DeploySettings) -> serve.Application:
    options: dict[str, Any] = {
        "name": ENGINE,
        "ray_actor_options": {"num_cpus": settings.cpus},
        "max_ongoing_requests": settings.most_waiting,
        "health_check_period_s": HEALTH_PERIOD_S,
        "graceful_shutdown_timeout_s": settings.drain_s,
    }
    if settings.routing in ROUTERS:
        router = f"heedful.deploy.request_router.{ROUTERS[settings.routing]}"
        options["request_router_config"] = RequestRouterConfig(request_router_class=router)
    scaling = settings.autoscaling
    if scaling is None:
        options["num_replicas"] = settings.replicas
    else:
        options["autoscaling_config"] = {
            "min_replicas": scaling.least,
            "max_replicas": scaling.most,
            "target_ongoing_requests": scaling.target_requests,
            "upscale_delay_s": scaling.up_s,
            "downscale_delay_s": scaling.down_s,
        }
    return serve.deployment(_Engine).options(**options).bind(settings)


def _make_ingress() -> Ingress:
    app_name = serve.get_replica_context().app_name
    return Ingress(asking(serve.get_deployment_handle(ENGINE, app_name=app_name)))


def asking(handle: Any) -> Ask:
    """A deployment's handle as what the ingress asks; Ray's errors get our name."""
    streaming = handle.options(stream=True)

    async def ask(asked: Forwarded) -> AsyncGenerator[Head | bytes, None]:
        response = streaming.forward.remote(asked)
        is_over = False
        try:
            async for piece in response:
                yield piece
            is_over = True
        except BackPressureError as error:
            raise ReplicaLost("too many requests wait", 429, is_final=True) from error
        except DeploymentUnavailableError as error:
            raise ReplicaLost("there is no replica", 503, is_final=True) from error
        except RayActorError as error:
            raise ReplicaLost("it has died") from error
        except RayError as error:
            raise ReplicaLost(f"it failed ({type(error).__name__})", 500, is_final=True) from error
        finally:
            if not is_over:
                response.cancel()

    return ask


_ingress = serve.deployment(serve.ingress(_make_ingress)()).options(
    name="Ingress", max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0}
)
