"""A local S3 server in a process of its own, and a gate in front of it that a test can close, hold or let fail."""

import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass

SECRET = "verysecretvalue123"
_SIGNED = {  # the server checks no signature, unless it is told to
    "Authorization": "AWS4-HMAC-SHA256 Credential=AKIDTESTS/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0",
    "Content-Type": "application/octet-stream",
}
_SERVER = """
import logging, os, sys, threading
from werkzeug.serving import make_server
from moto.server import DomainDispatcherApplication, create_backend_app

logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=True)
print(server.port, flush=True)
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()  # whoever started it has ended
server.serve_forever()
"""


class Gate:
    """What passes bytes on to the server. Closed, it refuses connections. It can stop at a request for good.

    `num_failures` connections get the answer 503 before the next one is passed on.
    """

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._hold_at, self._hold_after = b"", 0
        self._is_held = threading.Event()
        self._connections: list[socket.socket] = []
        self._listener: socket.socket | None = None
        self.port = 0
        self.num_failures = 0
        self.open()

    def open(self) -> None:
        """Accept connections, on the same port as before."""
        self._hold_at = b""
        self._listener = socket.create_server(("127.0.0.1", self.port), reuse_port=False)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def close(self) -> None:
        """Cut all connections, and refuse new ones."""
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._connections.clear()

    def hold_at(self, text: str, *, after: int = 0) -> None:
        """From the first request whose first line has this text, pass `after` bytes on, and nothing any more."""
        self._is_held.clear()
        self._hold_at, self._hold_after = text.encode(), after

    def wait_until_held(self, *, seconds: float = 60) -> None:
        assert self._is_held.wait(seconds), "no such request"

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            if self.num_failures > 0:
                self.num_failures -= 1
                self._fail(client)
                continue
            server = socket.create_connection(("127.0.0.1", self._server_port))
            self._connections += [client, server]
            for source, target in ((client, server), (server, client)):
                threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    def _fail(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            client.recv(1 << 16)
            client.sendall(b"HTTP/1.1 503 Slow Down\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
            client.shutdown(socket.SHUT_WR)
            client.recv(1 << 16)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        num_left: int | None = None  # bytes of the request at which to stop
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if self._hold_at and self._hold_at in data.partition(b"\r\n")[0]:
                    num_left = self._hold_after
                if num_left is not None:
                    target.sendall(data[:num_left])
                    num_left -= len(data)
                    if num_left <= 0:
                        self._is_held.set()
                        return
                    continue
                if self._is_held.is_set() and self._hold_at:
                    return
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


@dataclass
class S3Server:
    """The server. `port` is its own, without the gate."""

    process: "subprocess.Popen[str]"
    port: int
    gate: Gate

    @staticmethod
    def start() -> "S3Server":
        process = subprocess.Popen(
            [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        port = int(process.stdout.readline())
        return S3Server(process, port, Gate(port))

    def stop(self) -> None:
        self.gate.close()
        self.process.kill()
        self.process.communicate(timeout=20)

    @property
    def environ(self) -> dict[str, str]:
        """What a user sets to use it."""
        return {
            "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE000", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.gate.port}", "AWS_EC2_METADATA_DISABLED": "true",
        }  # fmt: skip

    def write(self, path: str, content: bytes = b"") -> None:
        """Write an object, `bucket/key`, or create a bucket."""
        self._request("PUT", path, content)

    def read(self, path: str) -> bytes:
        return self._request("GET", path)

    def keys(self, bucket: str) -> list[str]:
        """The keys of all objects of a bucket."""
        return re.findall(r"<Key>(.*?)</Key>", self._request("GET", f"{bucket}?list-type=2&max-keys=1000").decode())

    def latest(self, run: str) -> str:
        """The checkpoint that is the newest of `bucket/run`, for a reader."""
        try:
            return self.read(f"{run}/checkpoints/latest").decode().strip()
        except urllib.error.HTTPError:
            return ""

    def wait_for_latest(self, run: str, name: str, *, seconds: float = 60) -> None:
        until = time.monotonic() + seconds
        while self.latest(run) != name:
            assert time.monotonic() < until, f"latest is {self.latest(run)!r}"
            time.sleep(0.05)

    def check_credentials(self, is_on: bool) -> None:
        """Let the server refuse credentials that it does not know, as AWS does; it knows none."""
        self._request("POST", "moto-api/reset-auth", b"0" if is_on else b"inf", headers={"Content-Type": "text/plain"})

    def _request(
        self, method: str, path: str, content: bytes | None = None, headers: dict[str, str] | None = None
    ) -> bytes:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/{path}", data=content, method=method, headers={**_SIGNED, **(headers or {})}
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            return bytes(answer.read())
