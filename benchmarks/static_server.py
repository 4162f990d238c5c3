"""A fast S3 server: objects that are also local files are sent by sendfile, everything else is passed on to moto.

python -m benchmarks.static_server DIRECTORY PREFIX MOTO_PORT PORT MEGABYTES_PER_SECOND

Requests for /PREFIX/NAME are answered from DIRECTORY/NAME if that is a file; all others are passed on. A thread per
connection is enough, because Python does not touch the bytes. A rate above 0 makes it a network of so many megabytes
per second, over all connections.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import sys
import threading
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

_BLOCK = 256 << 10


class Network:
    """A rate limit that all connections share."""

    rate = 0.0  # bytes per second

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free_at = 0.0

    def take(self, num_bytes: int) -> None:
        """Wait until so many bytes may be sent."""
        if self.rate:
            with self._lock:
                now = time.monotonic()
                self._free_at = max(self._free_at, now) + num_bytes / self.rate
                wait = self._free_at - now
            if wait > 0:
                time.sleep(wait)


NETWORK = Network()


class Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    protocol_version = "HTTP/1.1"
    directory = Path()
    prefix = ""
    moto_port = 0

    def do_GET(self) -> None:
        """Send a file, a range of it, or moto's answer."""
        file = self._file()
        if file is None:
            self._pass_on()
            return
        size = file.stat().st_size
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first = int(found[1]) if found else 0
        last = min(int(found[2] or size - 1), size - 1) if found else size - 1
        self.send_response(206 if found else 200)
        if found:
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self._describe(file, last + 1 - first)
        self.wfile.flush()
        if self.command == "HEAD":
            return
        with open(file, "rb") as opened, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while first <= last:  # s3fs begins with a whole object, hangs up, and asks for its parts
                block = min(_BLOCK, last + 1 - first)
                NETWORK.take(block)
                first += os.sendfile(self.connection.fileno(), opened.fileno(), first, block)

    do_HEAD = do_GET  # noqa: N815

    def do_PUT(self) -> None:
        """Pass the request on to moto."""
        self._pass_on()

    do_POST = do_DELETE = do_PUT  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def _file(self) -> Path | None:
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        file = self.directory / path.removeprefix(self.prefix)
        return file if path.startswith(self.prefix) and not parts.query and file.is_file() else None

    def _describe(self, file: Path, length: int) -> None:
        state = file.stat()
        self.send_header("Content-Length", str(length))
        self.send_header("ETag", f'"{state.st_mtime_ns:x}"')
        self.send_header("Last-Modified", formatdate(state.st_mtime, usegmt=True))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        upstream = http.client.HTTPConnection("127.0.0.1", self.moto_port)
        upstream.request(self.command, self.path, body, dict(self.headers))
        answer = upstream.getresponse()
        data = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        length = answer.getheader("Content-Length", "0") if self.command == "HEAD" else str(len(data))
        self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(data)
        upstream.close()


class Server(ThreadingHTTPServer):
    """Accepts many connections at once."""

    request_queue_size = 256
    daemon_threads = True


if __name__ == "__main__":
    Handler.directory, Handler.prefix = Path(sys.argv[1]), f"/{sys.argv[2].strip('/')}/"
    Handler.moto_port = int(sys.argv[3])
    NETWORK.rate = float(sys.argv[5]) * 1e6
    Server(("127.0.0.1", int(sys.argv[4])), Handler).serve_forever()
