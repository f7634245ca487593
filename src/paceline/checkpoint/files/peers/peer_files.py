"""Files in the memory of other nodes: a rank writes copies of its own there, and reads those that its node lacks."""

import errno
import fcntl
import http.client
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http import HTTPStatus
from pathlib import Path

import msgspec

from paceline.checkpoint.files.peers.memory_server import BLOCK_BYTES, MemoryEndpoint
from paceline.errors import CheckpointError, SaveError
from paceline.filesystem.atomic_files import write_text
from paceline.filesystem.disk_full import require_free_space

_POLL_SECONDS = 0.05
_MAX_SILENCE_SECONDS = 30.0  # of a node during a transfer; the training may wait for it
_MAX_ENDPOINT_SECONDS = 90.0  # until a file that another node wrote is seen; a network disk may take a minute


def endpoint_path(attempt_folder: Path, node: int) -> Path:
    """Return the file in which the agent of a node says, for one attempt, how its memory can be reached."""
    return attempt_folder / f"memory-node-{node}.json"


def write_endpoint(attempt_folder: Path, node: int, endpoint: MemoryEndpoint) -> None:
    """Write the file of `endpoint_path`, which only its owner can read.

    Raises:
        OSError: it can't be written.
    """
    write_text(endpoint_path(attempt_folder, node), msgspec.json.encode(endpoint).decode(), private=True)


class PeerFiles:
    """The files in the memory of the nodes of one attempt, whose agents wrote their endpoints to `attempt_folder`."""

    def __init__(self, attempt_folder: Path, *, timeout_seconds: float) -> None:
        self._attempt_folder = attempt_folder
        self._silence_seconds = min(timeout_seconds, _MAX_SILENCE_SECONDS)
        self._endpoint_seconds = min(timeout_seconds, _MAX_ENDPOINT_SECONDS)
        self._endpoints: dict[int, MemoryEndpoint] = {}

    def send(self, node: int, file: Path) -> None:
        """Send a node a copy of a file of a checkpoint.

        Raises:
            SaveError: the node can't be reached, or has not enough memory.
        """
        try:
            with file.open("rb", buffering=0) as body:
                length = {"Content-Length": str(os.fstat(body.fileno()).st_size)}
                with _request(self._endpoint(node), "PUT", file, body, length, self._silence_seconds) as response:
                    status, text = response.status, response.read(1000).decode(errors="replace")
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise SaveError(f"node {node} did not take a copy of {file.name}: {error}.", where=str(file)) from error
        if status != HTTPStatus.CREATED:
            raise SaveError(f"node {node} did not take a copy of {file.name}: {text or status}.", where=str(file))

    def fetch(self, nodes: Sequence[int], file: Path) -> None:
        """Read a file of a checkpoint from the first of the nodes that has it, unless this machine has it.

        Raises:
            CheckpointError: none of the nodes sends it.
        """
        file.parent.mkdir(mode=0o700, exist_ok=True)
        with _locked(file.with_name(f".lock-{file.name}")):  # another rank of this node may fetch it, too
            if file.exists():
                return
            problems = []
            for node in nodes:
                try:
                    fetch_file(self._endpoint(node), file, timeout_seconds=self._silence_seconds)
                except (OSError, ValueError, http.client.HTTPException, SaveError) as error:
                    is_full = isinstance(error, SaveError) or getattr(error, "errno", None) == errno.ENOSPC
                    where = "no room on this node" if is_full else f"node {node}"
                    problems.append(f"{where}: {getattr(error, 'what', error)}".rstrip("."))
                else:
                    return
        raise CheckpointError(
            f"{file.name} of {file.parent.name} could not be read from another node ({'; '.join(problems)}).",
            where=str(file),
        )

    def _endpoint(self, node: int) -> MemoryEndpoint:
        """Return the endpoint of a node, after its agent has written it.

        Raises:
            OSError, ValueError: it has not, or the file is damaged.
        """
        path, deadline = endpoint_path(self._attempt_folder, node), time.monotonic() + self._endpoint_seconds
        while node not in self._endpoints:
            try:
                self._endpoints[node] = msgspec.json.decode(path.read_bytes(), type=MemoryEndpoint)
            except FileNotFoundError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_POLL_SECONDS)
        return self._endpoints[node]


def fetch_file(endpoint: MemoryEndpoint, file: Path, *, timeout_seconds: float) -> None:
    """Read a file of a checkpoint from a node, and write it to the same name here.

    Raises:
        SaveError: there is not enough memory.
        OSError, ValueError, http.client.HTTPException: the node does not send it, or it can't be written.
    """
    staging = file.with_name(f".incoming-{os.getpid()}-{file.name}")
    try:
        with _request(endpoint, "GET", file, None, {}, timeout_seconds) as response, staging.open("wb") as target:
            if response.status != HTTPStatus.OK:
                raise ValueError(f"it answers {response.status} {response.reason}")
            require_free_space(file.parent, response.length or 0)
            while block := response.read(BLOCK_BYTES):
                target.write(block)
            if response.length:  # `read` ends without an error if the connection is closed
                raise http.client.IncompleteRead(b"", response.length)
        staging.rename(file)
    finally:
        staging.unlink(missing_ok=True)


def read_peer_file(endpoint: MemoryEndpoint, file: Path, *, timeout_seconds: float) -> bytes:
    """Return the content of a file of a checkpoint on a node. Of the path `file`, the last two names count.

    Raises:
        OSError, ValueError, http.client.HTTPException: the node does not send it.
    """
    with _request(endpoint, "GET", file, None, {}, timeout_seconds) as response:
        if response.status != HTTPStatus.OK:
            raise ValueError(f"it answers {response.status} {response.reason}")
        return response.read()


@contextmanager
def _request(
    endpoint: MemoryEndpoint, method: str, file: Path, body: object, headers: dict[str, str], timeout_seconds: float
) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(
        endpoint.host, endpoint.port, timeout=timeout_seconds, blocksize=BLOCK_BYTES
    )
    try:
        path = f"/{file.parent.name}/{file.name}"
        with suppress(BrokenPipeError):  # the server has answered before it had read everything
            connection.request(method, path, body, {"Authorization": f"Bearer {endpoint.token}", **headers})  # type: ignore[arg-type]
        yield connection.getresponse()
    finally:
        connection.close()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
