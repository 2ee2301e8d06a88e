"""Every error that a user can meet. Each message says what happened; each remedy says what to do about it.

HeedfulError
├── UsageError                  the caller's request cannot be carried out as asked
│   ├── BadParameter            one named field has a value that is not allowed
│   ├── ContextOverflow         prompt longer than the model's context; both numbers are in it
│   ├── TemplateError           the chat template refuses these messages, or takes too long
│   └── PolicyError             a router's policy file says something that cannot be meant; names the place
├── SourceError                 a model cannot be found or fetched
│   ├── UnknownModel            no such alias or path; carries the nearest names
│   ├── LicenceNotAccepted      the model has terms that must be agreed to before it is fetched; carries them
│   └── DownloadError           the transfer failed
│       ├── NetworkUnavailable  nothing answered
│       ├── HashMismatch        the bytes are not the expected ones
│       └── DiskFull            no room for the file
├── FileFormatError             a model file that is malformed, or hostile
│   ├── GGUFError
│   ├── SafetensorsError
│   └── TokenizerError
├── UnsupportedModel            well-formed, but nothing here runs it
├── CannotExport                a file format has no place for something that the model has
├── BadLogits                   the model computed no usable numbers
├── TrainingDiverged            loss or gradients are no numbers any more; names the batch
├── ProcessLost                 another process of a training run has ended, or says nothing any more
├── CacheFull                   the KV pages do not fit in memory
├── QueueFull                   too many requests wait already
├── EngineStopped               the server is going down
├── TargetFailed                what a router sent a request to did not answer; names it, and HTTP's status
├── DeployFailed                Ray Serve could not start what it was to run; its reason is in it
├── HistoryError                the file of past chats cannot be read or written
└── McpError                    something about tools that are reached over MCP
    ├── McpConfigError          the file that names the servers is wrong; names file, server and field
    ├── McpNotApproved          a command or tool that nobody has agreed to yet, or that has changed since
    ├── McpServerDown           a server does not start, has ended, or is left alone after too many failures
    ├── McpTimeout              a call gave no sign of life for too long, or took too long altogether
    ├── McpUnknownTool          no server offers a tool of this name, or it is not to be used
    ├── McpCallFailed           a server refused a call, or answered what the protocol does not allow
    ├── McpBadArguments         a call's arguments are no JSON object, or not what the tool's schema says
    ├── McpDenied               the policy, or the person who was asked, does not want a call
    ├── McpRepeated             the same call for the third time in a turn
    └── McpHandleError          a kept result is gone, or has nothing at the place that was asked for

Contract violations inside heedful are `assert`s with the values, not members of this tree.
"""


class HeedfulError(Exception):
    """Base of all errors meant for users: `message` says what happened, `remedy` what to do."""

    exit_code = 1

    def __init__(self, message: str, remedy: str = "") -> None:
        self.message = message
        self.remedy = remedy
        super().__init__(f"{message}\n{remedy}" if remedy else message)


class UsageError(HeedfulError):
    exit_code = 2


class BadParameter(UsageError):
    """`field` is the public name of the parameter."""

    def __init__(self, field: str, message: str, remedy: str = "") -> None:
        self.field = field
        super().__init__(f"{field}: {message}", remedy)


class ContextOverflow(UsageError):
    def __init__(self, prompt_tokens: int, context_len: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.context_len = context_len
        super().__init__(
            f"the prompt has {prompt_tokens:,} tokens and the context is {context_len:,}",
            "Shorten the prompt, or allow cutting with --truncate (Python: truncate=True), "
            "which keeps the newest tokens and says how many it dropped.",
        )


class TemplateError(UsageError):
    pass


class PolicyError(UsageError):
    """`where`: the line and the key of a policy file that it is about."""

    def __init__(self, where: str, message: str, remedy: str = "") -> None:
        self.where = where
        super().__init__(f"{where}: {message}", remedy)


class SourceError(HeedfulError):
    pass


class UnknownModel(SourceError):
    def __init__(self, name: str, nearest: list[str], remedy: str) -> None:
        self.nearest = nearest
        hint = f" Did you mean {' or '.join(nearest)}?" if nearest else ""
        super().__init__(f"no model is called {name!r}.{hint}", remedy)


class LicenceNotAccepted(SourceError):
    """`terms` is the notice to show before asking."""

    def __init__(self, model: str, licence: str, terms: str) -> None:
        self.terms = terms
        super().__init__(
            f"{model} comes under the {licence}, which you have not accepted. {terms}",
            f"To accept: heedful pull {model} --accept-licence (Python: accept_licence=True).",
        )


class DownloadError(SourceError):
    pass


class NetworkUnavailable(DownloadError):
    pass


class HashMismatch(DownloadError):
    def __init__(self, what: str, expected: str, found: str) -> None:
        super().__init__(
            f"{what}: sha256 is {found}, expected {expected}",
            "The file was not kept. Fetch it again; if this repeats, the source or something between has changed it.",
        )


class DiskFull(DownloadError):
    pass


class FileFormatError(HeedfulError):
    pass


class GGUFError(FileFormatError):
    pass


class SafetensorsError(FileFormatError):
    pass


class TokenizerError(FileFormatError):
    pass


class UnsupportedModel(HeedfulError):
    pass


class CannotExport(HeedfulError):
    pass


class CacheFull(HeedfulError):
    pass


class QueueFull(HeedfulError):
    def __init__(self, waiting: int) -> None:
        super().__init__(
            f"{waiting} {'request waits' if waiting == 1 else 'requests wait'} already", "Try again in a few seconds."
        )


class EngineStopped(HeedfulError):
    def __init__(self) -> None:
        super().__init__("the server is shutting down", "Try again once it is back.")


class DeployFailed(HeedfulError):
    pass


class TargetFailed(HeedfulError):
    """`status`: what a caller's answer should have; `retry_after`: seconds that the target asked to wait."""

    def __init__(
        self, target: str, problem: str, remedy: str = "", *, status: int = 502, retry_after: float | None = None
    ) -> None:
        self.target = target
        self.problem = problem
        self.status = status
        self.retry_after = retry_after
        super().__init__(f"target {target} {problem}", remedy)


class BadLogits(HeedfulError):
    pass


class TrainingDiverged(HeedfulError):
    def __init__(self, step: int, loss: float, grad_norm: float, batch: str) -> None:
        super().__init__(
            f"after {step:,} steps loss is {loss:g} and the gradients' norm {grad_norm:g}: {batch}",
            "Nothing was changed or saved by this step. Take a lower optim.lr or a longer optim.warmup; or look at"
            " these documents; the newest checkpoint is from before.",
        )


class ProcessLost(HeedfulError):
    """`rank`: of the process that noticed it."""

    def __init__(self, rank: int, size: int, cause: str, remedy: str) -> None:
        self.rank = rank
        super().__init__(f"process {rank} of {size} has lost the others, so it ends too ({cause})", remedy)


class HistoryError(HeedfulError):
    pass


class McpError(HeedfulError):
    pass


class McpConfigError(McpError):
    exit_code = 2


class McpNotApproved(McpError):
    pass


class McpServerDown(McpError):
    """`server` is its name in the configuration; `what` is the message without it."""

    def __init__(self, server: str, what: str, remedy: str = "") -> None:
        self.server = server
        self.what = what
        super().__init__(f"MCP server {server!r} {what}", remedy)


class McpTimeout(McpError):
    """`is_idle`: it gave no sign of life for `limit_s`; else it has taken `limit_s` altogether."""

    def __init__(self, server: str, tool: str, limit_s: float, elapsed_s: float, *, is_idle: bool) -> None:
        self.is_idle = is_idle
        what = f"gave neither result nor progress for {limit_s:g} s" if is_idle else f"took longer than {limit_s:g} s"
        super().__init__(
            f"{tool} of MCP server {server!r} {what} ({elapsed_s:.1f} s since the call); it was cancelled",
            f"If it needs longer, raise {'idle_timeout_s' if is_idle else 'timeout_s'} under x-heedful of this server.",
        )


class McpUnknownTool(McpError):
    exit_code = 2


class McpCallFailed(McpError):
    """`code` is JSON-RPC's, where the server gave one."""

    def __init__(self, server: str, tool: str, message: str, code: int | None = None) -> None:
        self.code = code
        super().__init__(f"{tool} of MCP server {server!r}: {message}")


class McpBadArguments(McpError):
    """`signature` is the tool's, for whoever wrote the arguments."""

    exit_code = 2

    def __init__(self, tool: str, what: str, signature: str) -> None:
        self.signature = signature
        super().__init__(f"arguments of {tool}: {what}", f"It takes: {signature}")


class McpDenied(McpError):
    pass


class McpRepeated(McpError):
    pass


class McpHandleError(McpError):
    exit_code = 2
