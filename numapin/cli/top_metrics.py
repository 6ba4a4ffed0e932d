"""`numapin top --openmetrics`: metrics of a running job for a monitoring system. Edge.

Comes in: one `Top` after another. Goes out: OpenMetrics text: once on stdout, again and again in a file that is
replaced as a whole, or over HTTP on a loopback address.
"""

from __future__ import annotations

import ipaddress
import re
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.base.stderr import say
from numapin.cli.output import emit, require_writable, write
from numapin.errors import NumapinError, UsageError
from numapin.view.openmetrics import CONTENT_TYPE, UNKNOWN, ended, openmetrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from http.server import ThreadingHTTPServer

    from numapin.observe.top import Top

OPTION: Final = "--openmetrics"
STDOUT: Final = "-"
_ADDRESS: Final = re.compile(r"(?P<host>\[[^/\]]*\]|[^/:]*):(?P<port>[^/:]*)")
_PORT: Final = re.compile(r"[0-9]{1,5}")
_PATIENCE_S: Final = 5.0  # with a client that sends nothing


class Address(NamedTuple):
    """A loopback address to listen on."""

    host: str
    port: int

    def __str__(self) -> str:
        """Return it as part of a URL."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def target_of(text: str) -> Path | Address | None:
    """Return the file or the address that the option names; None is stdout.

    HOST:TEXT is an address if TEXT is a number or HOST is a loopback address, and otherwise a file. Raises UsageError
    for an address of another host, or without a valid port.
    """
    if text == STDOUT:
        return None
    match = _ADDRESS.fullmatch(text)
    if match is None:
        return Path(text)
    host = match["host"].strip("[]") or "127.0.0.1"
    port = int(match["port"]) if _PORT.fullmatch(match["port"]) else None
    if port is None and not _is_loopback(host):
        return Path(text)
    if port is None or port > 0xFFFF or not _is_loopback(host):
        raise UsageError(
            f"{OPTION} {text}: not a port of a loopback address",
            f"type: {OPTION} 127.0.0.1:9836 (for a file of this name: ./{text})",
        )
    return Address("127.0.0.1" if host == "localhost" else host, port)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def export(seen: Iterable[Top], run: str, target: Path | Address | None, *, once: bool) -> None:
    """Export samples: one to stdout, one or all until the job ends to a file, all over HTTP.

    When the job ends, or the export does, the file only says so: figures that are no longer true would stay there.

    Raises:
        NumapinError: The file cannot be written, or the address is taken.
    """
    if target is None:
        emit(openmetrics(next(iter(seen))))
    elif isinstance(target, Address):
        _serve(seen, target)
    else:
        _write(seen, run, target, once=once)


def _write(seen: Iterable[Top], run: str, path: Path, *, once: bool) -> None:
    require_writable(path, option=OPTION)
    if once:
        write(openmetrics(next(iter(seen))), path, option=OPTION)
        return
    try:
        for top in seen:
            write(openmetrics(top), path, option=OPTION)
    finally:
        write(ended(run), path, option=OPTION)
    say("the job ended")


def _serve(seen: Iterable[Top], address: Address) -> None:
    latest = [UNKNOWN]
    with _server(address, lambda: latest[0]) as port:
        say(f"metrics: http://{Address(address.host, port)}/metrics")
        for top in seen:
            latest[0] = openmetrics(top)
    say("the job ended")


@contextmanager
def _server(address: Address, text: Callable[[], str]) -> Iterator[int]:
    """Serve a text at /metrics in threads; yield the port. Raises NumapinError if the address cannot be used."""
    import threading

    try:
        server = _new_server(address, text)
    except OSError as error:
        raise NumapinError(
            f"{OPTION} {address}: cannot listen there: {error.strerror}",
            f"choose a free port: {OPTION} {Address(address.host, 0)}",
        ) from None
    with server:
        threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


def _new_server(address: Address, text: Callable[[], str]) -> ThreadingHTTPServer:
    import socket
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Handler(BaseHTTPRequestHandler):
        """Answers GET /metrics to clients that name a loopback address, so that no web page can ask for it."""

        timeout = _PATIENCE_S

        def do_GET(self) -> None:
            """Send the metrics."""
            if not _is_loopback(_host_of(self.headers.get("Host", "localhost"))):
                self.send_error(403)
            elif self.path.partition("?")[0] != "/metrics":
                self.send_error(404, explain="see /metrics")
            else:
                body = text().encode()
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
            """Log nothing: a scrape every few seconds is nothing to report."""

    class Server(ThreadingHTTPServer):
        """Its threads end with this process."""

        address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            """Ignore clients that go away."""

    return Server((address.host, address.port), Handler)


def _host_of(header: str) -> str:
    match = _ADDRESS.fullmatch(header)
    return (match["host"] if match else header).strip("[]")
