"""A store's counters for those who watch many jobs: TensorBoard scalars, and a Prometheus endpoint."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

from tiercache.errors import ConfigError
from tiercache.stats import Stats

_LABELS = {"bytes_used": "tier", "bytes_peak": "tier", "bytes_capacity": "tier", "bytes_moved": "direction"}
_GAUGES = ("bytes_used", "bytes_peak", "bytes_capacity", "bytes_kept", "pages")
TEXT = "text/plain; version=0.0.4; charset=utf-8"


class ScalarWriter(Protocol):
    """What TensorBoard's `SummaryWriter` has."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Notes one number."""


def _numbers(stats: Stats) -> Iterator[tuple[str, str, float]]:
    """(name, label, value) of every counter that is a number; the label is "" where there is none."""
    for name, value in stats.as_dict().items():
        if isinstance(value, dict):
            yield from ((name, label, float(number)) for label, number in value.items())
        elif isinstance(value, int | float):
            yield name, "", float(value)


def write_scalars(writer: ScalarWriter, stats: Stats, step: int, *, prefix: str = "tiercache") -> None:
    """Writes every counter to a TensorBoard writer, as in "tiercache/bytes_used/device".

    Args:
        writer: a `torch.utils.tensorboard.SummaryWriter`, or whatever has its `add_scalar`.
        stats: of a store.
        step: of the training run.
        prefix: of the tags.
    """
    for name, label, value in _numbers(stats):
        tag = "/".join(part for part in (prefix, name, label.replace("->", "_to_")) if part)
        writer.add_scalar(tag, value, step)


def prometheus_text(stats: Stats) -> str:
    """Every counter in Prometheus' text format, as in `tiercache_bytes_used{tier="device"} 4096`."""
    lines: list[str] = []
    seen = ""
    for name, label, value in _numbers(stats):
        full = f"tiercache_{name}" if name in _GAUGES else f"tiercache_{name}_total"
        if full != seen:
            lines.append(f"# TYPE {full} {'gauge' if name in _GAUGES else 'counter'}")
            seen = full
        labels = f'{{{_LABELS[name]}="{label}"}}' if label else ""
        lines.append(f"{full}{labels} {value:.17g}")
    return "\n".join(lines) + "\n"


class MetricsServer(AbstractContextManager["MetricsServer", None]):
    """Serves a store's counters over HTTP while the block runs: /metrics for Prometheus, /stats as JSON.

    Args:
        store: a `TierStore`.
        port: 0 takes a free one.
        host: address to listen on; only this machine's own by default, for whoever can reach it can read it.

    Attributes:
        url: of the server, without a path.

    Raises:
        ConfigError: the address cannot be listened on.
    """

    def __init__(self, store: Any, port: int = 0, host: str = "127.0.0.1") -> None:
        handler = type("Handler", (_Handler,), {"store": store})
        try:
            self._server = ThreadingHTTPServer((host, port), handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                "metrics: cannot listen", got=f"{host}:{port} ({error})", remedy="give a free port"
            ) from error
        self._server.daemon_threads = True
        self.url = f"http://{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="tiercache-metrics", daemon=True
        )
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the server and its thread. A second call does nothing."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    store: Any

    def do_GET(self) -> None:
        """Answers one request."""
        stats = self.store.stats()
        answers = {
            "/metrics": (TEXT, prometheus_text(stats)),
            "/stats": ("application/json", json.dumps(stats.as_dict())),
        }
        if self.path not in answers:
            self.send_error(404, "only /metrics and /stats are here")
            return
        kind, text = answers[self.path]
        body = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Says nothing: a scrape a second would fill the training run's log."""
