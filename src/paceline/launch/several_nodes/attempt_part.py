"""The part of an attempt that runs on one node: its request, which the fork server reads, and its environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config.secret_settings import holds_secret
from paceline.filesystem.atomic_files import report_write_errors, write_json
from paceline.launch.failures.failure_record import failure_path
from paceline.launch.inherited_environment import AGENT_PID, NODES
from paceline.nodes.network_interfaces import interface_name, list_interfaces
from paceline.run_folder.run_folder import RunFolder

_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class AttemptPart:
    """The part of one node: which of the ranks run there, and where rank 0 listens.

    `own_address` is the node's address on the network of the ranks. A `port` of 0 lets the kernel choose.
    """

    ranks: range
    address: str = _LOOPBACK
    port: int = 0
    own_address: str = _LOOPBACK
    node: int = 0
    memory_folder: str = ""
    """The folder of this node's checkpoints in memory, if it shares them with other nodes."""

    def write_request(self, run: RunFolder, attempt: int, request: Mapping[str, Any]) -> Path:
        """Write the request for the fork server of this node to the folder of the attempt, and return its path.

        Raises:
            UsageError: the folder can't be written.
        """
        folder = run.attempt_folder(attempt)
        path = folder / ("request.json" if self.node == 0 else f"request-node-{self.node}.json")
        nodes = (request.get("payload") or {}).get("nodes")
        own = {
            **request,
            "payload": self._payload(request["payload"]),
            "folder": str(folder.resolve()),
            "first_rank": self.ranks.start,
            "local_ranks": len(self.ranks),
            "address": self.address,
            "port": self.port,
            "variables": {**self._variables(), AGENT_PID: str(os.getpid()), **({NODES: nodes} if nodes else {})},
        }
        with report_write_errors(run.path):
            folder.mkdir(parents=True, exist_ok=self.node > 0)
            for rank in self.ranks if self.node else ():  # of a lost node, in whose place this one is
                failure_path(folder, rank).unlink(missing_ok=True)
            write_json(path, own, private=holds_secret(request["payload"].get("settings", ())))
        return path.resolve()

    def _payload(self, payload: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the payload for the ranks of this node."""
        plan = payload.get("peer_plan")
        if plan is None:
            return payload
        return {**payload, "memory_folder": self.memory_folder, "peer_plan": {**plan, "node": self.node}}

    def _variables(self) -> dict[str, str]:
        """Return the variables by which gloo and NCCL find the network interface.

        Those of the user are left alone, unless all ranks are on this machine.
        """
        if self.own_address == _LOOPBACK:
            return {_INTERFACE_VARIABLES[0]: "lo"}
        interface = interface_name(self.own_address, list_interfaces())
        return {name: interface for name in _INTERFACE_VARIABLES if interface and not os.environ.get(name)}
