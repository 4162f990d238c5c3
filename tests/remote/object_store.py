"""A real S3 server on loopback, and a proxy before it that counts requests and makes trouble."""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

BUCKET = "bucket"


def free_port() -> int:
    """Return an unused port of the loopback interface."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


@contextlib.contextmanager
def running_server(command: list[str], port: int, log: Path) -> Iterator[None]:
    """Run a server until the block ends, which begins when it answers."""
    with open(log, "wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as server:
        try:
            for _ in range(300):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                assert server.poll() is None, log.read_text()
                time.sleep(0.1)
            yield
        finally:
            server.kill()


@contextlib.contextmanager
def moto_server(log: Path) -> Iterator[int]:
    """Start moto's server; yields its port."""
    port = free_port()
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with running_server(command, port, log):
        yield port


class FaultProxy:
    """Passes TCP connections on to a server, request by request, and misbehaves when told to.

    `requests` counts (method, object) of requests that were passed on. `trouble` maps a piece of a request line to a
    list of troubles, each used once: "403", "500", "503", "cut" (the answer is cut in the middle), "drop" (no answer),
    "slow" (the answer takes its time). `delay` slows down every block of an answer, in seconds.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self.requests: Counter[tuple[str, str]] = Counter()
        self.trouble: dict[str, list[str]] = {}
        self.num_troubles = 0
        self.num_bytes = 0  # of answers
        self.delay = 0.0
        self.is_down = False
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def reset(self) -> None:
        self.requests.clear()
        self.num_bytes = 0
        self.trouble, self.num_troubles, self.delay, self.is_down = {}, 0, 0.0, False

    def fetched(self) -> Counter[str]:
        """How often each object was downloaded, whole or in ranges."""
        return Counter({name: count for (method, name), count in self.requests.items() if method == "GET"})

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        # One request per connection to the server: it closes the connection after its answer.
        with client, contextlib.suppress(OSError):
            while (request := _read_request(client)) is not None:
                head, body = request
                line = head.split(b"\r\n", 1)[0].decode()
                if self.is_down:
                    return
                if (kind := self._next_trouble(line)) in ("403", "500", "503"):
                    code = {"403": "AccessDenied", "500": "InternalError", "503": "SlowDown"}[kind]
                    text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>"
                    headers = f"Content-Type: application/xml\r\nContent-Length: {len(text)}"
                    client.sendall(f"HTTP/1.1 {kind} {code}\r\n{headers}\r\n\r\n{text}".encode())
                    continue
                if kind == "drop":
                    return
                if kind == "slow":
                    time.sleep(1)
                method, path, _ = line.split(" ", 2)
                with self._lock:
                    self.requests[method, path.partition("?")[0].removeprefix(f"/{BUCKET}/")] += 1
                if not self._pass_on(client, head, body, cut=kind == "cut"):
                    return

    def _next_trouble(self, line: str) -> str | None:
        with self._lock:
            for piece, kinds in self.trouble.items():
                if piece in line and kinds:
                    self.num_troubles += 1
                    return kinds.pop(0)
        return None

    def _pass_on(self, client: socket.socket, head: bytes, body: bytes, *, cut: bool) -> bool:
        head = re.sub(rb"\r\nConnection: [^\r]*", b"", head, flags=re.IGNORECASE)
        head = head.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)
        with socket.create_connection(("127.0.0.1", self._target)) as server:
            server.sendall(head + body)
            answer = b""
            while b"\r\n\r\n" not in answer:
                block = server.recv(65536)
                if not block:
                    return False
                answer += block
            answer = re.sub(rb"\r\nConnection: [^\r]*", b"", answer, count=1, flags=re.IGNORECASE)
            headers, _, _ = answer.partition(b"\r\n\r\n")
            is_chunked = b"chunked" in headers.lower()
            sent = 0
            while answer:
                if self.is_down:
                    return False
                if cut and sent == 0 and len(answer) > len(headers) + 8:
                    client.sendall(answer[: len(headers) + 8])
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    return False
                client.sendall(answer)
                sent += len(answer)
                self.num_bytes += len(answer)
                if self.delay:
                    time.sleep(self.delay)
                answer = server.recv(65536)
            return not is_chunked


def _read_request(client: socket.socket) -> tuple[bytes, bytes] | None:
    data = b""
    while b"\r\n\r\n" not in data:
        block = client.recv(65536)
        if not block:
            return None
        data += block
    head, _, body = data.partition(b"\r\n\r\n")
    found = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
    length = int(found[1]) if found else 0
    if b"expect: 100-continue" in head.lower():
        client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        head = re.sub(rb"\r\nExpect: [^\r]*", b"", head, flags=re.IGNORECASE)
    pieces = [body]
    missing = length - len(body)
    while missing > 0:
        block = client.recv(min(missing, 1 << 20))
        if not block:
            return None
        pieces.append(block)
        missing -= len(block)
    return head + b"\r\n\r\n", b"".join(pieces)
