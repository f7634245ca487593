"""Point-to-point messages between stages: tensors in one buffer, without pickle.

The receiver must know the length of a message in advance. So both sides of a link remember the layout of the last
tensors, and the next message has the length that this layout needs. The first number in the message is 0 if tensors
with the same layout follow it. It is -1 if the sender cancels the receive. Otherwise it is the length of a new layout:
the rest of the message is then empty, and two more messages follow, one with the layout and one with the tensors. So
while the shapes of microbatches do not change, each activation or gradient needs one message.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.comm.process_group import PendingMessage, World

_HEADER_BYTES = _ALIGNMENT_BYTES = 64
_CANCELLED = -1
_TAGS_PER_CHANNEL = 1 << 18  # more than any pipeline has links


@dataclass(frozen=True, kw_only=True)
class StageLink:
    """A link between two stages in one direction: the peer rank, and a tag that no other link with that rank has."""

    peer: int
    tag: int


@dataclass(kw_only=True)
class _LinkLayout:
    """The layout of the last message on a link, known to both sides. `note` is the JSON sent with the tensors.

    `tensor_formats` has the dtype, shape and strides of each tensor that the sender has sent; `layout` describes the
    tensors as JSON.
    """

    tensor_formats: Any = None
    note: Any = None
    layout: list[Any] = field(default_factory=list)
    num_bytes: int = _HEADER_BYTES


class StageChannel:
    """A channel that sends and receives over the processes of one `World`. Every wait fails after the group's timeout.

    Messages of different channels do not mix.
    """

    def __init__(self, world: World, *, channel: int = 0) -> None:
        self._world = world
        self._first_tag = channel * _TAGS_PER_CHANNEL
        self._device = torch.device("cpu") if world.backend == "gloo" else world.device
        self._sent_layouts: dict[StageLink, _LinkLayout] = {}
        self._received_layouts: dict[StageLink, _LinkLayout] = {}
        self._posted_receives: dict[StageLink, tuple[Tensor, Callable[[], object]]] = {}
        self._pending_sends: list[tuple[PendingMessage, Tensor]] = []
        self.sent_bytes = 0

    @property
    def matches_tags(self) -> bool:
        """True if receives can be posted early, because the transport matches messages by tag."""
        return self._world.backend == "gloo"

    def send(self, link: StageLink, tensors: list[Tensor], note: Any) -> None:
        """Start to send tensors with a note, and return immediately.

        `note` is JSON that rarely changes. The caller never modifies it in place.
        """
        layout_sent = self._sent_layouts.setdefault(link, _LinkLayout())
        formats = [(tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors]
        if formats != layout_sent.tensor_formats or note != layout_sent.note:
            layout_sent.tensor_formats, layout_sent.note = formats, note
            self._send_layout(link, layout_sent, layout=[_describe_tensor(tensor) for tensor in tensors])
        buffer = torch.empty(layout_sent.num_bytes, dtype=torch.uint8, device=self._device)
        buffer[:8].zero_()
        for view, tensor in zip(_views(buffer, layout_sent.layout), tensors, strict=True):
            view.copy_(tensor.detach())
        self._start_send(link, buffer)

    def _send_layout(self, link: StageLink, layout_sent: _LinkLayout, *, layout: list[Any]) -> None:
        """Announce that the layout changes, and send the new one."""
        header = torch.zeros(layout_sent.num_bytes, dtype=torch.uint8, device=self._device)
        text = json.dumps([layout_sent.note, layout], separators=(",", ":"))
        body = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(self._device)
        header[:8].view(torch.int64)[0] = body.numel()
        self._start_send(link, header)
        self._start_send(link, body)
        layout_sent.layout, layout_sent.num_bytes = layout, _num_bytes(layout)

    def post_receive(self, link: StageLink) -> None:
        """Post the next receive on a link, so that the transfer overlaps with compute."""
        layout_received = self._received_layouts.setdefault(link, _LinkLayout())
        self._posted_receives[link] = self._start_receive(link, layout_received.num_bytes)

    def receive(self, link: StageLink) -> tuple[list[Tensor], Any]:
        """Wait for the next message on a link; return its tensors, which are views of one buffer, and its note."""
        if link not in self._posted_receives:
            self.post_receive(link)
        layout_received = self._received_layouts[link]
        buffer, wait = self._posted_receives.pop(link)
        wait()
        layout_bytes = int(buffer[:8].view(torch.int64)[0])
        if layout_bytes:
            body, wait = self._start_receive(link, layout_bytes)
            wait()
            layout_received.note, layout_received.layout = json.loads(bytes(body.cpu().numpy()))
            layout_received.num_bytes = _num_bytes(layout_received.layout)
            buffer, wait = self._start_receive(link, layout_received.num_bytes)
            wait()
        if self._device != self._world.device:
            buffer = buffer.to(self._world.device)
        return list(_views(buffer, layout_received.layout)), layout_received.note

    def has_posted_receive(self, link: StageLink) -> bool:
        """Return whether a receive is posted on this link."""
        return link in self._posted_receives

    def cancel_receives(self, *, used_links: Iterable[StageLink]) -> None:
        """Cancel the posted receives. For that, each side sends an empty message on the links that it has sent on.

        Both sides call this at the same point in their programs. `used_links` are the links that this side has sent on.
        """
        for link in used_links:
            layout_sent = self._sent_layouts[link]
            buffer = torch.zeros(layout_sent.num_bytes, dtype=torch.uint8, device=self._device)
            buffer[:8].view(torch.int64)[0] = _CANCELLED
            self._start_send(link, buffer)
        for link in list(self._posted_receives):
            buffer, wait = self._posted_receives.pop(link)
            wait()
            assert int(buffer[:8].view(torch.int64)[0]) == _CANCELLED, "both sides cancel at the same point"
        self.finish()

    def finish(self) -> None:
        """Wait until all sends have completed."""
        for work, _ in self._pending_sends:
            work.wait()
        self._pending_sends.clear()

    def _start_send(self, link: StageLink, buffer: Tensor) -> None:
        self._pending_sends = [(work, tensor) for work, tensor in self._pending_sends if not work.is_completed()]
        work = self._world.start_send(buffer, to=link.peer, tag=self._first_tag + link.tag)
        self._pending_sends.append((work, buffer))
        self.sent_bytes += buffer.numel()

    def _start_receive(self, link: StageLink, num_bytes: int) -> tuple[Tensor, Callable[[], object]]:
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return buffer, self._world.start_receive(buffer, source=link.peer, tag=self._first_tag + link.tag).wait


def _describe_tensor(tensor: Tensor) -> list[Any]:
    """Return dtype and shape, and the strides if the memory is dense."""
    stride = list(tensor.stride()) if _is_dense(tensor) else []
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), stride]


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements lie in memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _num_tensor_bytes(description: list[Any]) -> int:
    dtype: torch.dtype = getattr(torch, description[0])
    return int(math.prod(description[1])) * dtype.itemsize


def _num_bytes(layout: list[Any]) -> int:
    return _HEADER_BYTES + sum(_aligned(_num_tensor_bytes(description)) for description in layout)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _views(buffer: Tensor, layout: list[Any]) -> Iterator[Tensor]:
    offset = _HEADER_BYTES
    for description in layout:
        dtype_name, shape, stride = description
        size = _num_tensor_bytes(description)
        flat = buffer[offset : offset + size].view(getattr(torch, dtype_name))
        yield flat.as_strided(shape, stride) if stride else flat.view(shape)
        offset += _aligned(size)
