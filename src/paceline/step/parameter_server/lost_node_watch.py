"""The first server's watch for lost nodes: it takes back what their workers were computing, without their timeout."""

import threading
from contextlib import suppress
from pathlib import Path

from paceline.comm.process_group import LaunchInfo
from paceline.launch.several_nodes.lost_nodes import LOST_NODES, LOST_WORK, LostWork
from paceline.step.parameter_server.state import ServerState

_POLL_SECONDS = 0.2


def watch_lost_nodes(state: ServerState, launch_info: LaunchInfo, folder: Path | None) -> None:
    """Start a thread that reads which nodes the head counts as lost, if there are other nodes.

    A machine that has vanished closes no connection, so without it a share would come back only after the timeout.
    """
    if folder is not None and launch_info.local_world_size < launch_info.world_size:
        threading.Thread(target=_watch, args=(state, folder), daemon=True, name="paceline-lost-nodes").start()


def _watch(state: ServerState, folder: Path) -> None:
    works: list[LostWork] = []
    while not state.wait_for_end(_POLL_SECONDS):
        lost_nodes = LOST_NODES.read(folder)
        for node in lost_nodes[len(works) :]:
            works.append(state.lose_node(node))
            with suppress(OSError):  # the note says it, too
                LOST_WORK.write(folder, works)
