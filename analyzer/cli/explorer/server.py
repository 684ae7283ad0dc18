"""The local server of the explorer: files of the page, and answers to its questions.

It listens on the loopback address only. Every path begins with a random token, so that other users and other pages do not reach it,
and a request with another Host header is refused, so that a name that resolves to this machine does not reach it either.
"""

from __future__ import annotations

import hmac
import json
import secrets
from concurrent.futures import BrokenExecutor, CancelledError
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any, Final

from analyzer.cli.explorer.answer import answer
from analyzer.cli.explorer.files import INDEX, POLICY, content, type_of
from analyzer.cli.explorer.state import Opened
from analyzer.errors import InputError
from analyzer.layout_search.processes import ProcessExecutor

ADDRESS: Final = "127.0.0.1"
MOST_BYTES: Final = 1_000_000
"""Bytes of a question."""
SECONDS: Final = 30
"""Time in which a request must arrive."""
QUESTION: Final = "answer"
STOP: Final = "stop"
"""Ends the search that runs."""
BACKEND: Final = "backend.json"
"""Tells the page who answers."""
HEADERS: Final = {
    "Content-Security-Policy": POLICY + "; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class ExplorerServer(ThreadingHTTPServer):
    """Serves the page and its answers until `shutdown`."""

    daemon_threads = True

    def __init__(self, port: int, opened: Opened | None) -> None:
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            raise InputError("--port", f"{port} cannot be used ({error.strerror})", "name another port, or leave it out") from None
        self.token = secrets.token_urlsafe(24)
        self.opened = opened
        self.one_at_a_time = Lock()
        """The engine has caches that its threads would share."""
        self.search = Search()

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{ADDRESS}:{self.server_port}/{self.token}/"

    def hosts(self) -> tuple[str, ...]:
        """The values of the Host header that are accepted."""
        return (f"{ADDRESS}:{self.server_port}", f"localhost:{self.server_port}")


class Search:
    """The search that runs in a process of its own, if there is one. A new one ends it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._running: ProcessExecutor | None = None
        self.count = 0
        """Searches that have begun."""

    @property
    def is_running(self) -> bool:
        """Whether a search runs."""
        return self._running is not None

    def run(self, question: dict[str, Any], opened: Opened | None) -> dict[str, Any]:
        """The answer to a search."""
        executor = ProcessExecutor(1)
        with self._lock:
            before, self._running = self._running, executor
            self.count += 1
        if before is not None:
            before.shutdown(wait=False, cancel_futures=True)
        try:
            found: dict[str, Any] = executor.submit(answer, question, opened).result()
        except (BrokenExecutor, CancelledError):
            return {"stopped": True}
        finally:
            executor.shutdown(wait=False, cancel_futures=True)
            with self._lock:
                self._running = None if self._running is executor else self._running
        return found

    def stop(self) -> None:
        """Ends the search that runs."""
        with self._lock:
            running, self._running = self._running, None
        if running is not None:
            running.shutdown(wait=False, cancel_futures=True)


class _Handler(BaseHTTPRequestHandler):
    server: ExplorerServer
    timeout = SECONDS
    protocol_version = "HTTP/1.1"
    server_version = "get-training-info"
    sys_version = ""

    def do_GET(self) -> None:
        name = self._name()
        if name is None:
            return
        if name == BACKEND:
            self._send(json.dumps({"backend": "server"}).encode(), type_of(name))
            return
        found = content(name or INDEX)
        if found is None:
            self._refuse(HTTPStatus.NOT_FOUND)
        else:
            self._send(found, type_of(name or INDEX))

    def do_POST(self) -> None:
        name = self._name()
        if name is None:
            return
        if name == STOP:
            self._body()
            self.server.search.stop()
            self._send(b"{}", type_of(".json"))
            return
        if name != QUESTION:
            self._refuse(HTTPStatus.NOT_FOUND)
            return
        body = self._body()
        if body is not None:
            self._send(json.dumps(self._answer(body)).encode(), type_of(".json"))

    def _name(self) -> str | None:
        """The name behind the token. A request of someone else is refused, and has None."""
        host, origin = self.headers.get("Host"), self.headers.get("Origin")
        if host not in self.server.hosts() or origin not in (None, f"http://{host}"):
            self._refuse(HTTPStatus.FORBIDDEN)
            return None
        token, slash, name = self.path.partition("?")[0].removeprefix("/").partition("/")
        if not slash or not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._refuse(HTTPStatus.FORBIDDEN)
            return None
        return name

    def _body(self) -> bytes | None:
        """The body of a question; None if it is refused."""
        length = self.headers.get("Content-Length", "")
        if self.headers.get_content_type() != "application/json" or "Transfer-Encoding" in self.headers:
            self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
            return None
        if not (length.isascii() and length.isdigit()):
            self._refuse(HTTPStatus.LENGTH_REQUIRED)
            return None
        if int(length) > MOST_BYTES:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return None
        return self.rfile.read(int(length))

    def _answer(self, body: bytes) -> dict[str, Any]:
        try:
            question = json.loads(body)
        except (ValueError, RecursionError):
            return {"error": "question: it is not JSON; load the page again"}
        server = self.server
        try:
            if isinstance(question, dict) and question.get("ask") == "search":
                return server.search.run(question, server.opened)
            with server.one_at_a_time:
                return answer(question, server.opened)
        except Exception as error:  # an error of this program must not end the connection without an answer
            return {"error": f"internal error: {type(error).__name__}: {error}"[:300]}

    def _refuse(self, status: HTTPStatus) -> None:
        self.close_connection = True
        self._send(status.phrase.encode(), "text/plain; charset=utf-8", status)

    def _send(self, body: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed about requests: their paths have the token."""
