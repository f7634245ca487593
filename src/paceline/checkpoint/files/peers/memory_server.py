"""The server with which the agent of a node gives other nodes access to the checkpoints in its memory, over HTTP.

PUT writes a file, and GET reads one. Each request carries the token of the server, which only those know who may read
the folder of the attempt. A file appears under its name only when it is complete.
"""

import hmac
import os
import re
import secrets
import threading
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
from typing_extensions import override

from paceline.errors import SaveError
from paceline.filesystem.disk_full import require_free_space

BLOCK_BYTES = 1 << 20
_PATH = re.compile(r"/(step-[0-9]{8,18})/([A-Za-z0-9_-][A-Za-z0-9._-]{0,200})")
_IDLE_SECONDS = 30.0  # a connection over which nothing comes for so long is closed
_MAX_CONNECTIONS = 256  # at the same time; others are closed, so that files for the agent itself are left


class MemoryEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The address of a server, and the token without which it answers nothing."""

    host: str
    port: int
    token: str


class MemoryServer:
    """A server for the files in `folder`, which it creates. It listens at `host`, on a port that the kernel chooses.

    Each attempt has a token of its own, so that a rank of an earlier attempt, which may still run on a node that is cut
    off, can't mix its files with those of this attempt.

    Raises:
        OSError: the folder can't be created, or there is no such address on this machine.
    """

    def __init__(self, folder: Path, *, host: str) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self._server = _Server(folder, host)
        threading.Thread(target=self._server.serve_forever, name="paceline-memory-server", daemon=True).start()

    @property
    def endpoint(self) -> MemoryEndpoint:
        """The address of this server, and the token of the current attempt."""
        host, port = self._server.server_address[:2]
        return MemoryEndpoint(host=str(host), port=int(port), token=self._server.token)

    def begin_attempt(self) -> None:
        """Choose a new token."""
        self._server.token = secrets.token_hex(16)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, folder: Path, host: str) -> None:
        self.folder = folder
        self.token = secrets.token_hex(16)
        self._free = threading.Semaphore(_MAX_CONNECTIONS)
        super().__init__((host, 0), _Handler)

    @override
    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    @override
    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    @override
    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: the other side reports a broken connection."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _IDLE_SECONDS
    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        """Write the body to the file that the path names."""
        path, length = self._requested_file(), self.headers.get("Content-Length", "")
        if path is None:
            return
        if not length.isdecimal():
            self._answer(HTTPStatus.LENGTH_REQUIRED)
            return
        staging = path.with_name(f".incoming-{secrets.token_hex(8)}")
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            require_free_space(self.server.folder, int(length))
            self._receive(staging, int(length))
            if not self._has_token():  # another attempt has begun in the meantime
                raise OSError("the attempt of this checkpoint has ended")
            staging.rename(path)
        except (OSError, SaveError) as error:
            staging.unlink(missing_ok=True)
            text = error.what.rstrip(".") if isinstance(error, SaveError) else str(error.strerror or error)
            self.close_connection = True  # the rest of the body is still to come
            self._answer(HTTPStatus.INSUFFICIENT_STORAGE, text.encode())
        else:
            self._answer(HTTPStatus.CREATED)

    def do_GET(self) -> None:
        """Send the file that the path names."""
        path = self._requested_file()
        if path is None:
            return
        try:
            file = path.open("rb", buffering=0)
        except OSError:
            self._answer(HTTPStatus.NOT_FOUND)
            return
        with file:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Length", str(os.fstat(file.fileno()).st_size))
            self.end_headers()
            self.connection.sendfile(file)

    def _requested_file(self) -> Path | None:
        """Return the file of the request; None if the request was refused."""
        if not self._has_token():
            self.close_connection = True
            self._answer(HTTPStatus.FORBIDDEN)
            return None
        match = _PATH.fullmatch(self.path)
        if match is None:
            self.close_connection = True
            self._answer(HTTPStatus.NOT_FOUND)
            return None
        return self.server.folder / match[1] / match[2]

    def _has_token(self) -> bool:
        typed, wanted = self.headers.get("Authorization", ""), f"Bearer {self.server.token}"
        return hmac.compare_digest(typed.encode(), wanted.encode())

    def _receive(self, path: Path, num_bytes: int) -> None:
        """Write the next `num_bytes` bytes of the body to a new file.

        Raises:
            OSError: there is no room, or the connection was closed before the end.
        """
        with path.open("xb", buffering=0) as file:
            while num_bytes:
                block = self.rfile.read(min(num_bytes, BLOCK_BYTES))
                if not block:
                    raise OSError("the connection was closed before the end of the file")
                file.write(block)
                num_bytes -= len(block)

    def _answer(self, status: HTTPStatus, body: bytes = b"") -> None:
        with suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    @override
    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""
