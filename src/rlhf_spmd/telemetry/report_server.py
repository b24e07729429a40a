"""The report of runs that go on, on loopback: the page asks for its data again and again."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from rlhf_spmd.telemetry.report import page_data, read_run, render

HERE = ("localhost", "127.0.0.1")


def open_server(runs: Sequence[str], port: int) -> ThreadingHTTPServer:
    """``serve_forever`` of it answers until it is interrupted. ``port`` 0: a free one. Raises ValueError where there is no such
    directory, OSError where the port is taken."""
    for run in runs:
        read_run(run)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers.get("Host", "").rpartition(":")[0] not in HERE:  # a page elsewhere whose name leads here
                return self.send_error(403)
            if self.path not in ("/", "/data"):
                return self.send_error(404)
            found = [read_run(run) for run in runs]
            text = render(found, is_live=True) if self.path == "/" else page_data(found, is_live=True)[0]
            body = text.encode(errors="replace")
            self.send_response(200)
            self.send_header("Content-Type", f"{'text/html' if self.path == '/' else 'application/json'}; charset=utf-8")
            self.send_header("Cache-Control", "no-store")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with suppress(ConnectionError):  # who asked has gone
                self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            """Nothing: a line for every look of every page would be all that is seen."""

    return ThreadingHTTPServer((HERE[1], port), Handler)
