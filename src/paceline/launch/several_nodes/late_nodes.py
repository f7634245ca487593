"""The nodes that take the places of lost ones while the run goes on."""

import threading
import time
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue

from paceline.errors import PacelineError, UsageError
from paceline.launch.several_nodes.node_group import Member
from paceline.nodes.node_meeting import Arrival, Reception

_LOOK_SECONDS = 1.0  # between two looks at who has come
_POLL_SECONDS = 0.1

Admission = Callable[[Mapping[int, Arrival]], Mapping[int, Member]]


class LateNodes:
    """The places of lost nodes, and a thread that admits nodes to them as long as one is free.

    `admit` examines the nodes that have come, and returns those that are new as members of the run. `report` gets a
    line if a node does not fit.
    """

    def __init__(self, reception: Reception, *, admit: Admission, places: int, report: Callable[[str], None]) -> None:
        self._reception = reception
        self._admit = admit
        self._report = report
        self._num_left = places  # how many nodes may still come late
        self._free: set[int] = set()
        self._admitted: SimpleQueue[tuple[int, Member]] = SimpleQueue()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def num_left(self) -> int:
        """The number of nodes that may still take the place of a lost one."""
        return self._num_left - len(self._free)

    def open_place(self, node: int) -> bool:
        """Free the place of a lost node. Return False if no further node may come late."""
        if node not in self._free and self.num_left <= 0:
            return False
        self._reception.vacate(node)
        self._free.add(node)
        if self._thread is None:
            self._closing.clear()
            self._thread = threading.Thread(target=self._run, name="paceline-late-nodes", daemon=True)
            self._thread.start()
        return True

    def take(self) -> dict[int, Member]:
        """Return the nodes that have been admitted since the last call."""
        taken: dict[int, Member] = {}
        while True:
            try:
                node, member = self._admitted.get_nowait()
            except Empty:
                break
            taken[node] = member
            self._free.discard(node)
            self._num_left -= 1
        if not self._free:
            self.close()
        return taken

    def wait(self, *, seconds: float, is_stopped: Callable[[], bool]) -> dict[int, Member]:
        """Wait until a node has been admitted, and return the new ones; none if none comes within `seconds`."""
        deadline = time.monotonic() + seconds
        while not (taken := self.take()) and self._free and time.monotonic() < deadline and not is_stopped():
            time.sleep(_POLL_SECONDS)
        return taken

    def close(self) -> None:
        """Admit no further node. The places stay free for another meeting at the same reception."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while not self._closing.is_set():
            seats, findings = self._reception.wait(
                wait_seconds=_LOOK_SECONDS, report=self._report, is_stopped=self._closing.is_set
            )
            for finding in (finding for finding in findings if finding.refusal_code == UsageError.exit_code):
                self._report(f"not admitted: {finding.what}")  # it has a problem of its own
            try:
                for admitted in self._admit(seats).items():
                    self._admitted.put(admitted)
            except PacelineError as error:
                self._report(f"not admitted: {error.what}")
            self._closing.wait(_POLL_SECONDS)
