"""A loopback server that speaks the few routes of a model hub's API that huggingface_hub's file system asks for.

It is no real hub: it knows one dataset repository, the files of a directory. The client is the real one. It also serves
the same files as plain HTTP, below /plain/.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

REPOSITORY = "me/chats"
TOKEN = "hf_a_token_not_to_be_told"
_COMMIT = "1234567890" * 4


class HubServer(ThreadingHTTPServer):
    """Serves a directory; `requests` lists what was asked for, as "GET /path"."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, directory: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.directory = directory
        self.requests: list[str] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(b"")

    do_HEAD = do_GET  # noqa: N815

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def _answer(self, body: bytes) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        api = f"/api/datasets/{REPOSITORY}"
        if path.startswith("/plain/"):
            return self._file(path.removeprefix("/plain/"))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._send(401, b'{"error": "Invalid username or password."}', {"X-Error-Message": "Invalid token"})
        if found := re.fullmatch(f"/datasets/{REPOSITORY}/resolve/[^/]+/(.*)", path):
            return self._file(found[1])
        if path == api or path.startswith(f"{api}/revision/"):
            return self._json({"id": REPOSITORY, "sha": _COMMIT, "siblings": [], "private": True, "tags": []})
        if found := re.fullmatch(f"{api}/tree/[^/]+(?:/(.*))?", path):
            return self._tree(found[1] or "", "recursive=true" in self.path.lower())
        if path.startswith(f"{api}/paths-info/"):
            asked = [one for key, one in _fields(body, self.headers.get("Content-Type", "")) if key == "paths"]
            return self._json([self._entry(one) for one in asked if self._local(one).exists()])
        return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _tree(self, name: str, recursive: bool) -> None:
        top = self._local(name)
        if not top.is_dir():
            return self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        found = top.rglob("*") if recursive else top.iterdir()
        return self._json([self._entry(str(one.relative_to(self.server.directory))) for one in sorted(found)])

    def _local(self, name: str) -> Path:
        return self.server.directory / name

    def _entry(self, name: str) -> dict[str, object]:
        path = self._local(name)
        digest = hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest()
        if path.is_dir():
            return {"type": "directory", "path": name, "oid": digest, "size": 0}
        content = hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()
        return {"type": "file", "path": name, "oid": content, "size": path.stat().st_size}

    def _file(self, name: str) -> None:
        path = self._local(name)
        if not path.is_file():
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        data, headers = path.read_bytes(), {"Accept-Ranges": "bytes", "X-Repo-Commit": _COMMIT}
        headers["ETag"] = f'"{hashlib.sha1(data, usedforsecurity=False).hexdigest()}"'
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if found is None:
            return self._send(200, data, headers)
        start, stop = int(found[1]), min(int(found[2] or len(data)) + 1, len(data))
        if start >= len(data):
            return self._send(416, b"", {**headers, "Content-Range": f"bytes */{len(data)}"})
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        return self._send(206, data[start:stop], headers)

    def _json(self, document: object) -> None:
        self._send(200, json.dumps(document).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _fields(body: bytes, content_type: str) -> list[tuple[str, str]]:
    """The fields of a form or of a JSON object."""
    if "json" in content_type:
        document = json.loads(body)
        return [(key, one) for key, some in document.items() for one in (some if isinstance(some, list) else [some])]
    from urllib.parse import parse_qsl

    return parse_qsl(body.decode())
