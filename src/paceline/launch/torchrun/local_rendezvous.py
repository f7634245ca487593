"""The rendezvous of `torchrun --rdzv-backend=paceline` on one machine: a new store for each attempt, and fast workers.

The store of an attempt has no address of a dead process in it. While the rendezvous is open, torchrun's workers start
in the script server, which has torch imported.
"""

import atexit
import os
import secrets
import socket
import subprocess
import sys
from contextlib import suppress
from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from typing_extensions import override

from paceline.errors import UsageError
from paceline.launch.agent.forkserver_client import module_path_options
from paceline.launch.rendezvous import listen_on_free_port
from paceline.launch.torchrun.startup import sitecustomize
from paceline.launch.torchrun.torchrun_backend import is_paceline_command

BACKEND = "paceline"
_TRAIN = "paceline.trainer.entrypoints:train"
_STORE_TIMEOUT = timedelta(seconds=60)
_BACKLOG = 1024
_EXIT_SECONDS = 5.0


def create_rendezvous(parameters: RendezvousParameters) -> RendezvousHandler:
    """Return the rendezvous of an agent.

    Raises:
        UsageError: there may be several nodes.
    """
    if parameters.max_nodes > 1:
        raise UsageError(
            f"--rdzv-backend={BACKEND} works on one node, and --nnodes asks for up to {parameters.max_nodes}.",
            hint="--rdzv-backend=c10d, with the same other options",
        )
    return LocalRendezvous(parameters)


class LocalRendezvous(RendezvousHandler):
    """A rendezvous of one agent with itself, so nobody is waited for."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._store: Store | None = None
        self._is_closed = False
        self._server = ScriptServerProcess()
        self._server.start()
        atexit.register(self._server.close)  # torchrun calls no `shutdown` when a signal ends it

    @override
    def get_backend(self) -> str:
        """Return the name of this backend."""
        return BACKEND

    @property
    @override
    def use_agent_store(self) -> bool:
        """True: the workers use the agent's store, which outlives each of them."""
        return True

    @override
    def next_rendezvous(self) -> RendezvousInfo:
        """Return a new store for the next attempt."""
        self._server.start()
        listener = listen_on_free_port()
        address, port = listener.getsockname()
        self._store = TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=_STORE_TIMEOUT,
            master_listen_fd=listener.detach(),
        )
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(address, port))

    @override
    def is_closed(self) -> bool:
        """Return whether the job is over."""
        return self._is_closed

    @override
    def set_closed(self) -> None:
        """Record that the job is over."""
        self._is_closed = True

    @override
    def num_nodes_waiting(self) -> int:
        """Return 0: there is only one node."""
        return 0

    @override
    def get_run_id(self) -> str:
        """Return the value of `--rdzv-id`."""
        return self._run_id

    @override
    def shutdown(self) -> bool:
        """End the script server and the store."""
        self._is_closed, self._store = True, None
        self._server.close()
        return True


class ScriptServerProcess:
    """The process of the script server, and the environment variables by which torchrun's workers find it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._module_path = os.environ.get("PYTHONPATH", "")

    def start(self) -> None:
        """Start the server, unless it is running. Without a server, workers start as usual."""
        if sys.platform != "linux" or self._is_running():
            return
        self.close()
        name = f"paceline-scripts-{secrets.token_hex(16)}"
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(f"\0{name}")
            listener.listen(_BACKLOG)
            listener.set_inheritable(True)
            self._process = subprocess.Popen(
                [
                    sys.executable, *module_path_options(), "-u", "-m", "paceline.launch.torchrun.script_server",
                    str(os.getpid()), str(listener.fileno()), _TRAIN if is_paceline_command(sys.argv) else "",
                ],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[listener.fileno()],
            )  # fmt: skip
            folder = os.path.dirname(sitecustomize.__file__)  # noqa: PTH120
            os.environ[sitecustomize.ADDRESS] = name
            os.environ[sitecustomize.AGENT] = str(os.getpid())
            os.environ[sitecustomize.MODULE_PATH] = self._module_path
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, self._module_path]))

    def _is_running(self) -> bool:
        """Return whether the server accepts connections. A killed one has closed its socket before it can be reaped."""
        if self._process is None or self._process.poll() is not None:
            return False
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.connect(f"\0{os.environ[sitecustomize.ADDRESS]}")
        except OSError:
            return False
        return True

    def close(self) -> None:
        """End the server, and restore the environment."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_EXIT_SECONDS)
        self._process = None
        for name in (sitecustomize.ADDRESS, sitecustomize.AGENT, sitecustomize.MODULE_PATH, "PYTHONPATH"):
            os.environ.pop(name, None)
        if self._module_path:
            os.environ["PYTHONPATH"] = self._module_path
