"""ServerArgs, PortArgs, SchedulerInfo: everything an instance is told, as frozen plain data.

Each option is declared once, on its field: flag text, limits and help come from the annotation, so that the
command line, the environment (`SGLMT_WORKERS`), the TOML file and the messages of `validate` cannot disagree.
`sglmt.configuration` merges the sources; this module imports nothing that starts anything.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import msgspec

from sglmt.errors import ConfigError

MAX_WORKERS = 1024
MAX_DETOKENIZERS = 64


@dataclass(frozen=True)
class Flag:
    """How one option is offered: help text, limits, and whether its value is a secret."""

    help: str
    minimum: float | None = None
    maximum: float | None = None
    metavar: str | None = None
    secret: bool = False
    hidden: bool = False


class ServerArgs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the operator asked for. Field `max_running_requests` is flag `--max-running-requests`."""

    # topology
    workers: Annotated[int, Flag("HTTP + tokenizer worker processes.", minimum=1, maximum=MAX_WORKERS, metavar="N")] = 2
    detokenizers: Annotated[int, Flag("Detokenizer processes.", minimum=1, maximum=MAX_DETOKENIZERS, metavar="M")] = 1
    router: Annotated[
        Literal["auto", "always"],
        Flag("`always`: router and split even with one worker, so that it can scale."),
    ] = "auto"
    name: Annotated[str, Flag("Name of the instance, for status and stop.")] = "default"
    # listening
    host: Annotated[str, Flag("Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Flag("Port to listen on; 0: any free one.", minimum=0, maximum=65535)] = 30000
    uds: Annotated[
        str | None, Flag("Listen on a unix socket at this path, instead of --host and --port.", metavar="PATH")
    ] = None
    uds_mode: Annotated[str, Flag("Permissions of the --uds socket, octal: who may connect.", metavar="MODE")] = "600"
    ssl_certfile: Annotated[
        str | None, Flag("PEM file with the certificate chain: serve HTTPS. May hold the key too.")
    ] = None
    ssl_keyfile: Annotated[str | None, Flag("PEM file with the key of --ssl-certfile.")] = None
    keep_alive_timeout: Annotated[float, Flag("Seconds an idle connection is kept open.", minimum=1, maximum=86400)] = (
        75.0
    )
    receive_timeout: Annotated[
        float,
        Flag("Seconds the headers of a request, and then its body, may take to arrive.", minimum=1, maximum=86400),
    ] = 60.0
    # model
    model_path: Annotated[
        str | None, Flag("GGUF file or Hugging Face directory. Default: the shipped SmolLM2-135M-Instruct.")
    ] = None
    tokenizer_path: Annotated[str | None, Flag("Directory or tokenizer.json, when not the model's own.")] = None
    served_model_name: Annotated[str | None, Flag("Name clients use. Default: `default`.")] = None
    chat_template: Annotated[str | None, Flag("File with a Jinja chat template, instead of the model's.")] = None
    tool_call_parser: Annotated[
        Literal["auto", "none", "hermes", "qwen", "llama3_json", "mistral"],
        Flag("Format of tool calls in the model's text; `auto`: the one its chat template is written for."),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "none", "deepseek-r1", "qwen3"],
        Flag("How the model marks its reasoning; `auto`: as its chat template does."),
    ] = "auto"
    context_length: Annotated[
        int | None,
        Flag("Longest prompt + output, in tokens. Default: the model's.", minimum=8, maximum=2**24),
    ] = None
    trust_remote_code: Annotated[bool, Flag("Let the model resolver run code that ships with a model.")] = False
    tokenizer_backend: Annotated[
        Literal["auto", "huggingface", "fastokens"],
        Flag("Tokenizer library; `auto`: fastokens where it is installed and gives the same ids."),
    ] = "auto"
    tokenizer_cache_mb: Annotated[
        int,
        Flag("Memory of each worker for tokenization results, in MiB; 0: none.", minimum=0, maximum=65536),
    ] = 16
    # engine
    engine: Annotated[Literal["openvino", "simulator"], Flag("What produces the tokens.")] = "openvino"
    engine_threads: Annotated[
        int | None, Flag("Threads of the engine. Default: all cores but one.", minimum=1, maximum=1024)
    ] = None
    engine_cache_mb: Annotated[
        int, Flag("Memory of the engine's key-value cache, in MiB.", minimum=16, maximum=2**20)
    ] = 512
    disaggregation_mode: Annotated[str, Flag("Only `null`: splitting prefill from decode is the engine's matter.")] = (
        "null"
    )
    simulator_step_ms: Annotated[
        float,
        Flag("Simulator: time of one step, in milliseconds; 0: as fast as it can.", minimum=0, maximum=60000),
    ] = 20.0
    simulator_tokens: Annotated[
        str | None, Flag("Simulator: token ids to emit, separated by commas, instead of seeded ones.")
    ] = None
    simulator_poison: Annotated[
        int | None, Flag("Simulator: token id that kills the engine when a prompt holds it, for tests.", minimum=0)
    ] = None
    simulator_continuing: Annotated[
        Literal["exact", "approximate", "refused"],
        Flag("Simulator: what it declares of requests that continue after the engine's death, for tests."),
    ] = "exact"
    simulator_seed: Annotated[int, Flag("Simulator: seed of the token source.", minimum=0, maximum=2**63 - 1)] = 0
    # admission
    max_running_requests: Annotated[int, Flag("Requests in the engine at once.", minimum=1, maximum=65536)] = 256
    max_queued_requests: Annotated[
        int, Flag("Requests waiting for the engine; more are refused with 429.", minimum=0, maximum=2**20)
    ] = 4096
    max_request_bytes: Annotated[
        int, Flag("Largest request body, in bytes; larger ones get 413.", minimum=1024, maximum=2**27)
    ] = 16 * 1024 * 1024
    max_prompts_per_request: Annotated[int, Flag("Most prompts x n in one request.", minimum=1, maximum=65536)] = 256
    # life
    start_timeout: Annotated[float, Flag("Seconds a process may take to become ready.", minimum=1, maximum=86400)] = (
        180.0
    )
    heartbeat_timeout: Annotated[
        float,
        Flag("Seconds without a heartbeat after which a process is replaced.", minimum=0.5, maximum=86400),
    ] = 20.0
    engine_step_timeout: Annotated[
        float, Flag("Seconds the engine may stay inside one step.", minimum=1, maximum=86400)
    ] = 300.0
    drain_timeout: Annotated[
        float, Flag("Seconds running requests get to finish on stop.", minimum=0, maximum=86400)
    ] = 30.0
    engine_wait: Annotated[
        float,
        Flag("Seconds a request waits for an engine that restarts, then 503.", minimum=0, maximum=86400),
    ] = 60.0
    max_restarts: Annotated[
        int, Flag("Deaths within the window after which a process is given up.", minimum=0, maximum=10**6)
    ] = 5
    restart_window: Annotated[float, Flag("Seconds of the restart window.", minimum=1, maximum=10**6)] = 60.0
    restart_backoff_max: Annotated[
        float, Flag("Longest pause before a process that keeps dying is tried again.", minimum=0, maximum=86400)
    ] = 30.0
    max_resubmits: Annotated[
        int, Flag("Resubmissions in a row that brought no token, then an error.", minimum=0, maximum=1000)
    ] = 3
    max_worker_rss: Annotated[
        str | None,
        Flag("Resident memory above which a worker is replaced: bytes, or with KiB, MiB, GiB.", metavar="SIZE"),
    ] = None
    max_worker_lifetime: Annotated[
        float | None,
        Flag("Seconds a worker serves, less up to a fifth by chance, before it is replaced.", minimum=1, maximum=10**8),
    ] = None
    # access
    api_key: Annotated[
        tuple[str, ...], Flag("Key clients must send; may be repeated. Better: the environment.", secret=True)
    ] = ()
    api_key_file: Annotated[str | None, Flag("File with one API key a line.")] = None
    admin_key: Annotated[
        tuple[str, ...],
        Flag("Key for the control routes, where API keys are not enough then; may be repeated.", secret=True),
    ] = ()
    admin_key_file: Annotated[str | None, Flag("File with one admin key a line.")] = None
    cors_origin: Annotated[
        tuple[str, ...],
        Flag("Site whose pages may call this API (https://host), or *; may be repeated.", metavar="ORIGIN"),
    ] = ()
    allowed_host: Annotated[
        tuple[str, ...],
        Flag("Host name that is answered (*.name: all below it); may be repeated. Default: any.", metavar="HOST"),
    ] = ()
    # telling
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Flag("Least severe line that is logged.")] = (
        "info"
    )
    log_format: Annotated[
        Literal["text", "json"], Flag("Format of the log: lines for people, or one JSON object a line.")
    ] = "text"
    log_dir: Annotated[
        str | None, Flag("Directory for a log file NAME.log, besides standard output; it is rotated.")
    ] = None
    log_max_bytes: Annotated[
        int,
        Flag("Size at which a log file in --log-dir, or of --detach, is rotated.", minimum=65536, maximum=2**40),
    ] = 16 * 1024 * 1024
    log_keep: Annotated[int, Flag("Rotated log files that are kept.", minimum=0, maximum=1000)] = 3
    runtime_dir: Annotated[
        str | None,
        Flag("Directory for the run directories. Default: $XDG_RUNTIME_DIR/sglmt or the temp dir."),
    ] = None

    @property
    def mode(self) -> Literal["single", "multi"]:
        """Single mode has one worker, no router and no split."""
        return "single" if self.workers == 1 and self.router == "auto" else "multi"

    @property
    def url_scheme(self) -> Literal["http", "https"]:
        """How clients reach the port."""
        return "http" if self.ssl_certfile is None else "https"

    @property
    def uds_permissions(self) -> int:
        """`--uds-mode` as a number. Raises ConfigError for anything but octal permissions that let us in."""
        if re.fullmatch(r"0?o?[0-7]{3}", self.uds_mode) and int(self.uds_mode[-3:], 8) & 0o600 == 0o600:
            return int(self.uds_mode[-3:], 8)
        raise ConfigError(f"--uds-mode {self.uds_mode!r}: octal permissions such as 600 or 660 are expected")

    @property
    def max_worker_rss_bytes(self) -> int | None:
        """`--max-worker-rss` in bytes. Raises ConfigError for anything but a size of at least 1 MiB."""
        if self.max_worker_rss is None:
            return None
        found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?) ?([KMG]i?B?|B?)", self.max_worker_rss.strip(), re.IGNORECASE)
        size = 0
        if found is not None:
            size = int(float(found[1]) * _SIZE_UNITS[found[2][:1].upper()])
        if size < 2**20:
            raise ConfigError(f"--max-worker-rss {self.max_worker_rss!r}: a size such as 800MiB or 1.5GiB is expected")
        return size

    @property
    def model_name(self) -> str:
        """The name clients use."""
        return self.served_model_name or "default"

    def validate(self) -> None:
        """Raise ConfigError, naming the flag, for the first value that cannot be used."""
        for field, flag in flags():
            _check_range(field, flag, getattr(self, field))
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,31}", self.name):
            raise ConfigError(
                f"--name {self.name!r}: use 1 to 32 letters, digits, '_', '.' or '-', beginning with a letter or digit"
            )
        if self.disaggregation_mode != "null":
            raise ConfigError(
                f"--disaggregation-mode {self.disaggregation_mode!r}: only `null` is supported; "
                "splitting prefill from decode is the engine's matter"
            )
        if self.mode == "multi" and self.detokenizers > 1 and self.max_running_requests < self.detokenizers:
            raise ConfigError(f"--detokenizers {self.detokenizers}: more than --max-running-requests")
        _check_host(self.host)
        _check_uds(self.uds)
        _ = self.uds_permissions
        self.simulator_script()
        _ = self.max_worker_rss_bytes
        for path, flag_name in (
            (self.chat_template, "--chat-template"),
            (self.api_key_file, "--api-key-file"),
            (self.admin_key_file, "--admin-key-file"),
        ):
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"{flag_name} {path!r}: no such file")
        if self.model_path is not None and not Path(self.model_path).exists():
            raise ConfigError(f"--model-path {self.model_path!r}: no such file or directory")
        for flag_name, keys in (("--api-key", self.api_key), ("--admin-key", self.admin_key)):
            if any(not key or key != key.strip() for key in keys):
                raise ConfigError(f"{flag_name}: a key must not be empty or begin or end with white space")
        self._check_access()

    def _check_access(self) -> None:
        for origin in self.cors_origin:
            if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[A-Za-z0-9.:\[\]-]+", origin):
                raise ConfigError(f"--cors-origin {origin!r}: * or scheme://host[:port] is expected, without a path")
        for host in self.allowed_host:
            if not re.fullmatch(r"\*|(\*\.)?[A-Za-z0-9_.-]{1,253}|\[[0-9A-Fa-f:.]+\]", host):
                raise ConfigError(f"--allowed-host {host!r}: a host name without a port is expected")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError(f"--ssl-keyfile {self.ssl_keyfile!r}: needs --ssl-certfile")
        if self.ssl_certfile is not None:
            from sglmt.tls import server_context

            server_context(self.ssl_certfile, self.ssl_keyfile)

    def simulator_script(self) -> tuple[int, ...] | None:
        """The ids of `--simulator-tokens`. Raises ConfigError for anything but integers."""
        if self.simulator_tokens is None:
            return None
        try:
            script = tuple(int(part) for part in self.simulator_tokens.split(","))
        except ValueError:
            raise ConfigError(
                f"--simulator-tokens {self.simulator_tokens!r}: token ids separated by commas expected"
            ) from None
        return script

    def without_secrets(self) -> ServerArgs:
        """The same with every secret option at its default: what may be written to shared memory."""
        return msgspec.structs.replace(self, api_key=(), admin_key=())

    def redacted(self) -> dict[str, Any]:
        """All options for people to see, secrets replaced."""
        shown: dict[str, Any] = msgspec.to_builtins(self)
        for field, flag in flags():
            if flag.secret and shown[field]:
                shown[field] = "[redacted]"
        return shown


class PortArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Where the processes of one instance meet. Socket paths follow from `run_dir` (sglmt.ipc.addresses)."""

    run_dir: str
    url: str
    host: str
    port: int


class SchedulerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler knows once its engine is loaded; the second revision of the segment."""

    engine: str
    engine_version: str
    model_path: str
    context_length: int
    vocab_size: int
    max_running_requests: int
    max_total_tokens: int | None
    capabilities: dict[str, str]  # feature → exact | approximate | refused
    is_simulator: bool
    embedding_dimensions: int | None = None  # numbers in a vector; None: no embeddings


def flags() -> list[tuple[str, Flag]]:
    """(field, Flag) of every option, in declaration order."""
    hints = get_type_hints(ServerArgs, include_extras=True)
    return [
        (field, next(extra for extra in hints[field].__metadata__ if isinstance(extra, Flag)))
        for field in ServerArgs.__struct_fields__
    ]


def flag_name(field: str) -> str:
    """`max_restarts` → `--max-restarts`."""
    return "--" + field.replace("_", "-")


_MAX_SOCKET_PATH_BYTES = 107
_SIZE_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def _check_range(field: str, flag: Flag, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    low, high = flag.minimum, flag.maximum
    if not math.isfinite(value) or (low is not None and value < low) or (high is not None and value > high):
        raise ConfigError(f"{flag_name(field)} {value}: must be between {low:g} and {high:g}")


def _check_uds(uds: str | None) -> None:
    if uds is None:
        return
    length = len(os.fsencode(os.path.abspath(uds))) if uds else 0
    if not uds or "\0" in uds or uds.endswith("/"):
        raise ConfigError(f"--uds {uds!r}: the path of a file is expected")
    if length > _MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"--uds {uds!r}: its absolute path has {length} bytes, a socket's may have {_MAX_SOCKET_PATH_BYTES}"
        )


def _check_host(host: str) -> None:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if not re.fullmatch(r"[A-Za-z0-9.-]{1,253}", host):
            raise ConfigError(f"--host {host!r}: an IP address or host name expected") from None
