"""The counts of an instance in Prometheus' text format. Pure: a reading of the state page in, bytes out.

Every family and label value comes from a fixed table: an instance has the same series from its first second on,
whichever worker answers and however many there are.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from sglmt.ipc.state_page import SlotWord
from sglmt.messages.frame import Role
from sglmt.status.counters import Counts
from sglmt.status.histograms import LATENCY_BUCKETS
from sglmt.status.metric_words import ROUTES, AbortCause, Outcome, abort_word, route_word

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_CHILDREN = tuple(role for role in Role if role is not Role.SUPERVISOR)
_DELIVERY_EVENTS = {
    "unroutable": SlotWord.UNROUTABLE,
    "undecodable": SlotWord.UNDECODABLE,
    "late": SlotWord.LATE_ROWS,
    "duplicate": SlotWord.DUPLICATE_ROWS,
    "gap": SlotWord.GAP_ROWS,
    "stale_attempt": SlotWord.STALE_ATTEMPT_ROWS,
    "dropped": SlotWord.DROPPED_MESSAGES,
    "resume": SlotWord.RESUMES,
    "resubmission": SlotWord.RESUBMISSIONS,
    "approximate_resume": SlotWord.APPROXIMATE_RESUMES,
}
_FLOWS = {
    "sglmt_messages": ("Messages between processes", SlotWord.MESSAGES_IN, SlotWord.MESSAGES_OUT),
    "sglmt_rows": ("Rows of output between processes", SlotWord.ROWS_IN, SlotWord.ROWS_OUT),
}
_TOKENS = {
    "sglmt_prompt_tokens": ("Prompt tokens sent to the engine", SlotWord.PROMPT_TOKENS),
    "sglmt_generated_tokens": ("Tokens delivered to requests", SlotWord.OUTPUT_TOKENS),
    "sglmt_tokenizer_cache_hits": ("Prompts whose ids were known from an earlier one", SlotWord.ENCODE_HITS),
    "sglmt_tokenizer_cache_misses": ("Prompts that had to be encoded, at least in part", SlotWord.ENCODE_MISSES),
    "sglmt_tokenizer_encoded_tokens": ("Tokens of prompts that were encoded", SlotWord.ENCODED_TOKENS),
    "sglmt_tokenizer_reused_tokens": ("Tokens of prompts that were known", SlotWord.REUSED_TOKENS),
    "sglmt_cached_tokens": ("Prompt tokens the engine had in its cache", SlotWord.CACHED_TOKENS),
}
_HISTOGRAMS = {
    "sglmt_time_to_first_token_seconds": (
        "From submission to the first token", SlotWord.TTFT_BUCKETS, SlotWord.TTFT_SUM_US,
    ),
    "sglmt_inter_token_latency_seconds": (
        "Between two rows of tokens of a request", SlotWord.ITL_BUCKETS, SlotWord.ITL_SUM_US,
    ),
    "sglmt_request_latency_seconds": (
        "From submission to the normal end of an answer", SlotWord.E2E_BUCKETS, SlotWord.E2E_SUM_US,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class BuildInfo:
    """What an instance is, as labels."""

    version: str
    engine: str
    model: str
    mode: str


def exposition(counts: Counts, build: BuildInfo) -> bytes:
    """The body of `/metrics`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Fixed([*_counters(counts), *_histograms(counts), *_gauges(counts), _build_info(build)]))
    return generate_latest(registry)


class _Fixed(Collector):
    """Families that are already made."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _counters(counts: Counts) -> Iterator[Metric]:
    worker = counts.roles[Role.TOKENIZER_WORKER].words
    yield _single("sglmt_http_requests_received", "HTTP requests begun", worker[SlotWord.REQUESTS_TOTAL])
    yield _labelled(
        "sglmt_http_requests", "HTTP requests that ended, by route and outcome", ("route", "outcome"),
        {
            (path, outcome.name.lower()): worker[route_word(path, outcome)]
            for path in ROUTES
            for outcome in Outcome
        },
    )  # fmt: skip
    for name, (text, word) in _TOKENS.items():
        yield _single(name, text, worker[word])
    yield _labelled(
        "sglmt_aborts", "Requests that ended without their normal finish, by cause", ("cause",),
        {(cause.name.lower(),): worker[abort_word(cause)] for cause in AbortCause},
    )  # fmt: skip
    yield _single("sglmt_connections_accepted", "Connections accepted", worker[SlotWord.CONNECTIONS_TOTAL])
    yield _labelled(
        "sglmt_restarts", "Processes started again because one had died, by role", ("role",),
        {(role.label,): counts.roles[role].words[SlotWord.RESTARTS] for role in _CHILDREN},
    )  # fmt: skip
    yield _labelled(
        "sglmt_delivery_events", "What happened to rows and messages, by the role that saw it", ("role", "event"),
        {
            (role.label, event): counts.roles[role].words[word]
            for role in _CHILDREN
            for event, word in _DELIVERY_EVENTS.items()
        },
    )  # fmt: skip
    for name, (text, word_in, word_out) in _FLOWS.items():
        yield _labelled(
            name, f"{text}, by role and direction", ("role", "direction"),
            {
                (role.label, direction): counts.roles[role].words[word]
                for role in _CHILDREN
                for direction, word in (("in", word_in), ("out", word_out))
            },
        )  # fmt: skip


def _histograms(counts: Counts) -> Iterator[Metric]:
    words = counts.roles[Role.TOKENIZER_WORKER].words
    for name, (text, first, sum_word) in _HISTOGRAMS.items():
        cumulative, buckets = 0, []
        for number, bound_us in enumerate([*LATENCY_BUCKETS, None]):
            cumulative += words[first + number]
            buckets.append(("+Inf" if bound_us is None else str(bound_us / 1e6), float(cumulative)))
        yield HistogramMetricFamily(name, text, buckets=buckets, sum_value=words[sum_word] / 1e6)


def _gauges(counts: Counts) -> Iterator[Metric]:
    roles = counts.roles
    scheduler, worker = roles[Role.SCHEDULER], roles[Role.TOKENIZER_WORKER]
    yield GaugeMetricFamily("sglmt_requests_running", "Requests in the engine", scheduler.running)
    yield GaugeMetricFamily("sglmt_requests_queued", "Requests that wait for the engine", scheduler.queued)
    yield GaugeMetricFamily("sglmt_requests_in_flight", "Answers the workers wait for", worker.in_flight)
    yield GaugeMetricFamily("sglmt_connections_open", "Open connections of clients", worker.connections)
    yield GaugeMetricFamily("sglmt_ready", "1 while requests can be served", int(counts.ready))
    yield GaugeMetricFamily("sglmt_workers_requested", "Tokenizer workers asked for", counts.workers_requested)
    yield _gauge("sglmt_processes_up", "Processes that serve", {r.label: roles[r].up for r in _CHILDREN})
    yield _gauge(
        "sglmt_backlog_bytes", "Kept back because the next process does not take it now",
        {role.label: roles[role].backlog_bytes for role in _CHILDREN},
    )  # fmt: skip


def _build_info(build: BuildInfo) -> Metric:
    labels = {
        "version": build.version,
        "python": platform.python_version(),
        "engine": build.engine,
        "model": build.model,
        "mode": build.mode,
    }
    family = GaugeMetricFamily("sglmt_build_info", "What this instance is; always 1", labels=list(labels))
    family.add_metric(list(labels.values()), 1)
    return family


def _single(name: str, text: str, value: int) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def _labelled(name: str, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family


def _gauge(name: str, text: str, by_role: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=["role"])
    for role, value in by_role.items():
        family.add_metric([role], value)
    return family
