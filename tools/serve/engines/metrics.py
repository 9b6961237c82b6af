"""Prometheus metrics; equal quantities have vLLM's names, so that its dashboards work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from edgellm.device_runtime.api.llm import LLM
from edgellm.tools.energy import Meter
from edgellm.tools.serve.engines.events import Finished

_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
_STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class Registry:
    """All metrics of a server, each with a label for the engine."""

    def __init__(self) -> None:
        self._collectors = CollectorRegistry()
        self._families: dict[str, Any] = {}

    def family(self, kind: Callable[..., Any], name: str, text: str, **more: Any) -> Any:
        """A metric family of all engines, created at its first use."""
        if name not in self._families:
            more = {"labelnames": ["model_name"], **more}
            self._families[name] = kind(name, text, registry=self._collectors, **more)
        return self._families[name]

    def show_energy(self, meter: Meter) -> None:
        """Add the machine's energy since the start, and its power since the last page."""
        self._collectors.register(_EnergyCollector(meter))

    def page(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._collectors)


class _EnergyCollector(Collector):
    """Metrics of the whole machine, without a label for an engine."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._last = (0.0, 0.0)  # joules, seconds

    def collect(self) -> Iterator[Metric]:
        """Read the sensors."""
        self._meter.read()
        total, (joules, seconds) = self._meter.total, self._last
        yield CounterMetricFamily("edgellm:energy_joules", "Energy.", value=total.joules)
        self._last = total.joules, total.seconds
        watts = (total.joules - joules) / (total.seconds - seconds or 1.0)
        yield GaugeMetricFamily("edgellm:power_watts", "Power since the last page.", value=watts)
        peak = total.peak_watts
        yield GaugeMetricFamily("edgellm:peak_power_watts", "Highest power.", value=peak)


class Metrics:
    """The metrics of one engine."""

    def __init__(self, model: str, registry: Registry | None = None) -> None:
        self._registry = registry or Registry()
        self._model = model
        self._loaded = self._gauge("edgellm:engine_loaded", "1 if the engine is loaded.")
        self._loads = self._counter("edgellm:engine_loads", "Number of loads.")
        self.rejected = self._counter("edgellm:request_refused", "Rejected: full queue.")
        self._running = self._gauge("vllm:num_requests_running", "Requests in the engine.")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Requests in the queue.")
        self._cache_usage = self._gauge("vllm:kv_cache_usage_perc", "KV cache usage; 1 is full.")
        self._first = self._histogram(
            "vllm:time_to_first_token_seconds", "Time from arrival to the first token.", _SECONDS
        )
        self._between = self._histogram(
            "vllm:inter_token_latency_seconds",
            "Time between the tokens of two steps.",
            _STEP_SECONDS,
        )
        self._whole = self._histogram(
            "vllm:e2e_request_latency_seconds", "Time from arrival to the last token.", _SECONDS
        )
        self._queued = self._histogram(
            "vllm:request_queue_time_seconds", "Time from arrival to the engine.", _SECONDS
        )
        self._batch_size = self._histogram(
            "edgellm:batch_size", "Sequences in a forward pass.", (1, 2, 4, 8, 16, 32)
        )
        self._preempted = self._counter("vllm:num_preemptions", "Preemptions of sequences.")
        self._prompt = self._counter("vllm:prompt_tokens", "Prompt tokens.")
        self.audio = self._counter("edgellm:audio_seconds", "Seconds of transcribed audio.")
        self.generated = self._counter("vllm:generation_tokens", "Generated tokens.")
        self._looked_up = self._counter("vllm:prefix_cache_queries", "Looked-up tokens.")
        self._found = self._counter("vllm:prefix_cache_hits", "Tokens in the prefix cache.")
        self._drafts = self._counter("vllm:spec_decode_num_drafts", "Verified draft trees.")
        self._drafted = self._counter("vllm:spec_decode_num_draft_tokens", "Drafted tokens.")
        self._accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Accepted tokens.")
        self._ended = self._registry.family(
            Counter,
            "vllm:request_success",
            "Requests by finish reason; abort: the client disconnected.",
            labelnames=["model_name", "finished_reason"],
        )

    def watch(self, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        """Connect the gauges to the worker of a loaded engine."""
        self._running.set_function(running)
        self._waiting.set_function(waiting)
        self._loads.inc()
        self._loaded.set(1)

    def watch_batch(self, llm: LLM) -> None:
        """Connect the batch size and the KV cache's gauge to a loaded engine."""
        self._cache_usage.set_function(lambda: llm.kv_cache_manager.usage)
        llm.on_pass(self._observe_pass)

    def unwatch(self) -> None:
        """Drop all references to an engine that is unloaded."""
        for gauge in (self._running, self._waiting, self._cache_usage):
            gauge.set_function(lambda: 0.0)
        self._loaded.set(0)

    def _observe_pass(self, batch_size: int, preempted: int) -> None:
        self._batch_size.observe(batch_size)
        self._preempted.inc(preempted)

    def first_token(self, seconds: float, prompt_tokens: int) -> None:
        """Record a prefill and the first token after it."""
        self._first.observe(seconds)
        self._prompt.inc(prompt_tokens)

    def next_tokens(self, seconds: float) -> None:
        """Record a further step of a sequence."""
        self._between.observe(seconds)

    def ended(self, reason: str) -> None:
        """Record the end of a request."""
        self._ended.labels(self._model, reason).inc()

    def finished(self, figures: Finished, seconds: float) -> None:
        """Record the statistics of a finished sequence."""
        self.ended(figures.finish_reason)
        self._whole.observe(seconds)
        self._queued.observe(figures.queue_ms / 1e3)
        self._looked_up.inc(figures.prompt_tokens)
        self._found.inc(figures.cached_tokens)
        self._drafts.inc(len(figures.rounds))
        self._drafted.inc(sum(counts.tree_size - 1 for counts in figures.rounds))
        self._accepted.inc(sum(counts.accepted for counts in figures.rounds))

    def page(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return self._registry.page()

    def _counter(self, name: str, text: str) -> Counter:
        return self._registry.family(Counter, name, text).labels(self._model)

    def _gauge(self, name: str, text: str) -> Gauge:
        return self._registry.family(Gauge, name, text).labels(self._model)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        found = self._registry.family(Histogram, name, text, buckets=buckets)
        return found.labels(self._model)
