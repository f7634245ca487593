"""A link to another node while a run lasts: its messages, and how long nothing has come from it."""

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from paceline.nodes.line_channel import LineChannel

_BEAT = {"do": "beat"}
_BEAT_SECONDS = 1.0
_POLL_SECONDS = 0.2
_MAX_GAP_SECONDS = 2.0  # a longer time between two looks at the network is a pause of this process


class NodeLink:
    """A link over a channel. One thread receives messages, and another one sends a beat every second.

    The network is trusted, as it is by gloo and NCCL: whoever has the channel may send any message.
    """

    def __init__(self, channel: LineChannel) -> None:
        self.loss = ""
        """Why nothing can come from the node any more, such as a closed connection; empty while the link is open."""
        self.channel = channel
        self._messages: SimpleQueue[Any] = SimpleQueue()
        self._silence_seconds = 0.0
        self._lock = threading.Lock()  # a line is sent whole
        self._closed = threading.Event()
        threading.Thread(target=self._receive, name="paceline-node", daemon=True).start()
        threading.Thread(target=self._beat, name="paceline-beat", daemon=True).start()

    @property
    def silence_seconds(self) -> float:
        """The seconds for which nothing has come, without the time in which this process itself was stopped."""
        return self._silence_seconds

    @property
    def own_address(self) -> str:
        """The IP address of this end."""
        return self.channel.own_address

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message. If the link is lost, nothing happens, because `loss` says it."""
        with suppress(OSError), self._lock:
            self.channel.send(message)

    def next_message(self) -> Any:
        """Return the next message that has arrived; None if there is none."""
        try:
            return self._messages.get_nowait()
        except Empty:
            return None

    def close(self) -> None:
        """Close the link."""
        self._closed.set()
        self.channel.close()

    def _receive(self) -> None:
        last_look = time.monotonic()
        try:
            while not self._closed.is_set():
                messages = self.channel.receive_available(seconds=_POLL_SECONDS)
                now = time.monotonic()
                gap_seconds, last_look = min(now - last_look, _MAX_GAP_SECONDS), now
                self._silence_seconds = 0.0 if messages else self._silence_seconds + gap_seconds
                for message in messages:
                    if message != _BEAT:
                        self._messages.put(message)
        except (OSError, ValueError) as error:
            self.loss = getattr(error, "strerror", None) or str(error)

    def _beat(self) -> None:
        while not self.loss and not self._closed.wait(_BEAT_SECONDS):
            self.send(_BEAT)
