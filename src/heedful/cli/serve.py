"""`heedful serve`: models behind the APIs that clients already speak."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heedful.cli.policy_options import (
    Budget,
    Kv,
    Precise,
    Prefill,
    Sinks,
    Speculate,
    Window,
    policy_from_options,
    warn_of_loss,
)
from heedful.cli.prefix_options import PrefixCache, PrefixCacheSize, prefix_cache_from_options, size_in_bytes
from heedful.errors import BadParameter
from heedful.weights.source_names import default_model

if TYPE_CHECKING:
    from heedful.decide.decider import DecisionModel
    from heedful.engine.embedder import Embedder
    from heedful.engine.llm import LLM
    from heedful.router.policy import Policy
    from heedful.server.settings import ServerSettings

KEY_VARIABLE = "HEEDFUL_API_KEY"


def serve(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL", help="Models, as with -m.", show_default=False)
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", "-m", help="Alias, path, hf:org/name or wheel:…; may be given again."),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=DIR",
            help="A LoRA adapter of the first model, which requests choose as model NAME; may be given again.",
        ),
    ] = None,
    decider: Annotated[
        list[str] | None,
        typer.Option(
            help="What answers /v1/systemone and /v1/decisions, as for `heedful decide -m`; may be given again. "
            "Default: the first model."
        ),
    ] = None,
    router: Annotated[
        Path | None,
        typer.Option(metavar="POLICY", help="YAML or TOML: where the model `auto` sends requests; docs/routing.md."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8080,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help=f"Requests must carry it; may be given again. Better: {KEY_VARIABLE}, keys with commas."),
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A host name that requests may be addressed to; * is any.")
    ] = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option(help="Pages of this origin may call, as in https://app.example; * is any.")
    ] = None,
    context: Annotated[int | None, typer.Option(help="Tokens of prompt and answer; default: the model's.")] = None,
    threads: Annotated[int | None, typer.Option(help="Processors to use; default: all.")] = None,
    max_waiting: Annotated[int, typer.Option(help="Requests that may wait; further ones get 429.")] = 256,
    max_loaded: Annotated[int, typer.Option(help="Models in memory at once.")] = 2,
    idle_unload: Annotated[float, typer.Option(help="Minutes until an unused model is unloaded; 0: never.")] = 15.0,
    drain: Annotated[float, typer.Option(help="Going down: seconds that open answers may take to end.")] = 30.0,
    kv: Kv = None,
    precise: Precise = None,
    window: Window = None,
    sinks: Sinks = 0,
    budget: Budget = None,
    prefill: Prefill = "dense",
    speculate: Speculate = False,
    kv_memory: Annotated[
        str | None, typer.Option(help="The most that keys and values may take, as in 500MB; default: by free memory.")
    ] = None,
    prefix_cache: PrefixCache = None,
    prefix_cache_size: PrefixCacheSize = "2GB",
    weights: Annotated[str | None, typer.Option(help="Quantize weights at load: q8 or q4; default: as stored.")] = None,
    history: Annotated[
        Path | None, typer.Option(help="Where the page's conversations are kept; default: the user's data folder.")
    ] = None,
    no_history: Annotated[bool, typer.Option("--no-history", help="Keep no conversations.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No line for each request.")] = False,
) -> None:
    """Serve models over HTTP: OpenAI's, Anthropic's and System One's APIs, metrics, and a page to chat at /."""
    require_server()
    from heedful.listening import listen
    from heedful.server.app import make_app
    from heedful.server.request_log import RequestLog
    from heedful.server.run import serve as run
    from heedful.server.settings import ServerSettings

    route_policy = _route_policy(router)
    routed_models = route_policy.local_models if route_policy else ()
    asked = [*(models or []), *(model or [])] or ([] if routed_models else [default_model])
    served = tuple(dict.fromkeys([*asked, *routed_models]))
    settings = ServerSettings(
        models=served,
        adapters=_adapters(adapter or [], served),
        deciders=tuple(dict.fromkeys(decider or ())),
        host=host,
        port=_within("--port", port, 0, 65535),
        api_keys=_keys(api_key),
        allowed_hosts=tuple(allow_host or ()),
        allowed_origins=tuple(allow_origin or ()),
        policy=policy_from_options(kv, precise, window, sinks, budget, prefill),
        speculate=speculate,
        most_waiting=_within("--max-waiting", max_waiting, 1, 100_000),
        most_models_loaded=max(_within("--max-loaded", max_loaded, 1, 1000), _needed(route_policy)),
        idle_unload_seconds=None if idle_unload <= 0 else idle_unload * 60,
        drain_seconds=_within("--drain", drain, 0, 3600),
        history_path=None if no_history else str(history or _default_history()),
    )
    listening = listen(settings.host, settings.port)  # before minutes of loading
    loader = _Loader(
        settings,
        {
            "context_len": context,
            "threads": threads,
            "policy": settings.policy,
            "weights": weights,
            "kv_memory_bytes": size_in_bytes("--kv-memory", kv_memory) if kv_memory is not None else None,
            **prefix_cache_from_options(prefix_cache, prefix_cache_size),
        },
    )
    if models or model or routed_models or route_policy is None:  # else a front for others: no model of its own
        loader.load_first()
    loader.find_deciders()
    warn_of_loss(settings.models[0], settings.policy)
    log = None if quiet else RequestLog(sys.stderr)
    app = make_app(settings, loader.llm, loader.embedder, loader.decider, route_policy, log)
    _announce(settings, listening.getsockname()[1], loader, route_policy)
    run(app, settings, listening)


class _Loader:
    """Makes models by name. The first one is loaded before the server starts, so that errors show on the terminal."""

    def __init__(self, settings: ServerSettings, options: dict[str, Any]) -> None:
        self._first = settings.models[0]
        self._adapters = settings.adapters
        self._deciders = settings.deciders
        self._options = options
        self._ready: dict[str, LLM] = {}

    def load_first(self) -> None:
        from heedful.weights.load_encoder import names_encoder
        from heedful.weights.sources import resolve

        if not names_encoder(resolve(self._first).path):
            self._ready[self._first] = self.llm(self._first)
        elif self._adapters:
            raise BadParameter("--adapter", f"{self._first} is an encoder: adapters are of a model that generates text")

    def find_deciders(self) -> None:
        """Loads none, and raises here what is wrong with a name."""
        from heedful.decide.load import find_decider

        for name in self._deciders:
            find_decider(name)

    @property
    def first(self) -> LLM | None:
        return self._ready.get(self._first)

    def llm(self, name: str) -> LLM:
        from heedful.engine.llm import LLM

        adapters = self._adapters if name == self._first else None
        return self._ready.pop(name, None) or LLM(name, **self._options, adapters=adapters)

    def embedder(self, name: str) -> Embedder:
        from heedful.engine.embedder import load_embedder

        return load_embedder(name, threads=self._options["threads"])

    def decider(self, name: str) -> DecisionModel:
        from heedful.decide.load import find_decider, load_decider

        is_remote = find_decider(name).kind == "jev"
        return load_decider(name, threads=None if is_remote else self._options["threads"])


def _announce(settings: ServerSettings, port: int, loader: _Loader, route_policy: Policy | None) -> None:
    from heedful.kernels import native

    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    print(f"heedful: {', '.join(settings.models)} at http://{host}:{port} (OpenAI: /v1, page: /)", file=sys.stderr)
    if settings.adapters:
        names = ", ".join(settings.adapters)
        print(f"heedful: adapters of {settings.models[0]}: {names}", file=sys.stderr)
    if settings.deciders:
        print(f"heedful: deciders are {', '.join(settings.deciders)}, loaded when first asked", file=sys.stderr)
    if route_policy is not None:
        targets = ", ".join(route_policy.targets)
        print(f"heedful: auto goes to one of {targets} ({route_policy.path})", file=sys.stderr)
    llm = loader.first
    if llm is not None:
        runner = llm.engine.runner
        kernels = native.variant() if native.is_built() else "PyTorch"
        budget = runner.cache.budget_bytes
        room = f"{budget / 1e9:.1f} GB" if budget >= 1e9 else f"{budget / 1e6:.0f} MB"
        print(
            f"heedful: {kernels} kernels, {runner.threads} threads, up to {room} of keys and values",
            file=sys.stderr,
        )
    if not settings.api_keys and settings.host not in ("127.0.0.1", "localhost", "::1"):
        print("heedful: anybody who reaches this address can use it; --api-key asks for a key", file=sys.stderr)
    sys.stderr.flush()


def _adapters(given: list[str], models: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in given:
        name, equals, source = text.partition("=")
        if not (name and equals and source):
            raise BadParameter("--adapter", f"{text!r:.80} is not NAME=DIR", "For instance: --adapter law=path/to/law")
        if name in found or name in models:
            raise BadParameter("--adapter", f"two models would be called {name!r:.80}", "Give it another name.")
        found[name] = source
    return found


def _route_policy(path: Path | None) -> Policy | None:
    """Raises PolicyError, for what the environment lacks too, and SourceError for a decider that there is none of."""
    if path is None:
        return None
    from heedful.decide.load import default_decider, find_decider
    from heedful.router.policy import OpenAISpec
    from heedful.router.policy_file import load_policy
    from heedful.router.replicas import remote_target

    policy = load_policy(path)
    for spec in policy.targets.values():
        if isinstance(spec, OpenAISpec):
            remote_target(spec)  # before minutes of loading
    for name in policy.deciders(default_decider()):
        find_decider(name)
    return policy


def _needed(policy: Policy | None) -> int:
    """Models that a policy has in memory at once: with less each request would load one."""
    if policy is None:
        return 1
    from heedful.decide.load import default_decider

    return max(1, len({*policy.local_models, *policy.deciders(default_decider())}))


def _keys(given: list[str] | None) -> tuple[str, ...]:
    keys = [*(given or []), *os.environ.get(KEY_VARIABLE, "").split(",")]
    return tuple(key.strip() for key in keys if key.strip())


def _within(option: str, value: Any, least: float, most: float) -> Any:
    if not least <= value <= most:
        raise BadParameter(option, f"must be between {least} and {most:,}")
    return value


def _default_history() -> Path:
    import platformdirs

    return Path(platformdirs.user_data_dir("heedful")) / "page.sqlite"


def require_server() -> None:
    from importlib.util import find_spec

    missing = [
        name for name in ("starlette", "uvicorn", "httptools", "msgspec", "prometheus_client") if not find_spec(name)
    ]
    if missing:
        raise BadParameter("serve", f"needs {', '.join(missing)}", "pip install 'heedful[server]'")
