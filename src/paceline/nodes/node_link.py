"""A link to another node while a run lasts: its messages, how long nothing has come from it, and what that means."""

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from paceline.nodes.line_channel import LineChannel

_BEAT = {"do": "beat"}
_END = object()
_BEAT_SECONDS, _CLOSE_SECONDS = 1.0, 2.0
_POLL_SECONDS = 0.2
_STALL_SECONDS = 2.0  # without a beat: then signs on new connections
_SIGN_SECONDS = 1.0  # for one of them
_WARNING_SECONDS, _PRESENT_SECONDS = 10.0, 1.0
_MAX_GAP_SECONDS = 2.0  # a longer time between two looks at the network is a pause of this process


class NodeLink:
    """A link over a channel. One thread receives messages, and another one sends them, or a beat every second.

    Whoever sends a message does not wait: on a network that has become silent, a send may never end.

    After a cut of the network, TCP waits about as long again before it repeats what was lost. Therefore, the end that
    opened the connection also tries new ones while no beat comes, and for as long again: what answers there is alive,
    and hears that this end is. So a node is silent for about as long as the network is, on both ends.

    The network is trusted, as it is by gloo and NCCL: whoever has the channel may send any message.
    """

    def __init__(self, channel: LineChannel) -> None:
        self.loss = ""
        """Why nothing can come from the node any more, such as a closed connection; empty while the link is open."""
        self.channel = channel
        self._messages: SimpleQueue[Any] = SimpleQueue()
        self._silence_seconds = 0.0
        self._stall_seconds = 0.0  # without a message on this connection
        self._outgoing: SimpleQueue[Any] = SimpleQueue()
        self._closed = threading.Event()
        threading.Thread(target=self._receive, name="paceline-node", daemon=True).start()
        self._sender = threading.Thread(target=self._send_messages, name="paceline-beat", daemon=True)
        self._sender.start()
        if channel.key:
            threading.Thread(target=self._send_signs, name="paceline-sign", daemon=True).start()

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
        self._outgoing.put(message)

    def next_message(self) -> Any:
        """Return the next message that has arrived; None if there is none."""
        try:
            return self._messages.get_nowait()
        except Empty:
            return None

    def close(self) -> None:
        """Send what is left, for at most two seconds, and close the link."""
        if not self._closed.is_set():
            self._closed.set()
            self._outgoing.put(_END)
            self._sender.join(_CLOSE_SECONDS)
        self.channel.close()

    def _receive(self) -> None:
        last_look = time.monotonic()
        try:
            while not self._closed.is_set():
                messages = self.channel.receive_available(seconds=_POLL_SECONDS)
                now = time.monotonic()
                gap_seconds, last_look = min(now - last_look, _MAX_GAP_SECONDS), now
                self._stall_seconds = 0.0 if messages else self._stall_seconds + gap_seconds
                is_alive = self.channel.take_sign() or bool(messages)
                self._silence_seconds = 0.0 if is_alive else self._silence_seconds + gap_seconds
                for message in messages:
                    if message != _BEAT:
                        self._messages.put(message)
        except (OSError, ValueError) as error:
            self.loss = getattr(error, "strerror", None) or str(error)

    def _send_messages(self) -> None:
        while not self.loss:
            message: Any = _BEAT
            with suppress(Empty):
                message = self._outgoing.get(timeout=_BEAT_SECONDS)
            if message is _END:
                return
            with suppress(OSError):
                self.channel.send(message)

    def _send_signs(self) -> None:
        """Send signs while the connection is stalled, and then for twice that time: the other end hears TCP later."""
        end_time = 0.0
        while not self._closed.wait(_BEAT_SECONDS) and not self.loss:
            now = time.monotonic()
            if self._stall_seconds > _STALL_SECONDS:
                end_time = max(end_time, now + 2 * self._stall_seconds)
            if now < end_time and self.channel.send_sign(timeout_seconds=_SIGN_SECONDS):
                self.channel.note_sign()


class SilenceWatch:
    """The judgement of how long nothing has come from a node, which is the same on both ends of its link."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self.is_silent = False
        """Whether the screen says that the node is silent."""

    def is_gone(self, seconds: float) -> bool:
        """Return whether a node from which nothing has come for `seconds` is lost."""
        return seconds > self._patience

    def news(self, name: str, seconds: float) -> str:
        """Return a line that says that the node is silent, or is there again; "" if nothing is new."""
        if seconds > min(_WARNING_SECONDS, self._patience / 2):
            if self.is_silent:
                return ""
            self.is_silent = True
            text = f"nothing for {seconds:.0f} s; it counts as gone after {self._patience:.0f} s (nodes.patience)"
            return f"{name}: {text}"
        if self.is_silent and seconds < _PRESENT_SECONDS:
            self.is_silent = False
            return f"{name} is there again"
        return ""
