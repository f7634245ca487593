"""Point-to-point messages between stages: tensors in one buffer, and their layout when it changes; nothing is pickled.

A message has the same length as the previous message on its link. Its first number says whether the layout changes. If
so, the rest of the message is empty, and the new layout and the tensors follow in two more messages. Steps whose
microbatches have equal shapes therefore send one message per activation or gradient.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.comm.process_group import PendingMessage, World

HEAD_BYTES = ALIGNED_BYTES = 64
_NOTHING = -1
_TAGS = 1 << 18  # per channel; more than any pipeline has links


@dataclass(frozen=True, kw_only=True)
class StageLink:
    """A link between two stages in one direction: the peer rank, and a tag that no other link to that rank has."""

    peer: int
    tag: int


@dataclass(kw_only=True)
class _Known:
    """The layout of the last message on a link, known to both sides."""

    form: Any = None
    note: Any = None
    layout: list[Any] = field(default_factory=list)
    num_bytes: int = HEAD_BYTES


class StageChannel:
    """A channel that sends and receives over the processes of one `World`. Every wait ends after the group's timeout.

    Messages of different channels do not mix.
    """

    def __init__(self, world: World, *, channel: int = 0) -> None:
        self._world = world
        self._first_tag = channel * _TAGS
        self._device = torch.device("cpu") if world.backend == "gloo" else world.device
        self._sent: dict[StageLink, _Known] = {}
        self._heard: dict[StageLink, _Known] = {}
        self._posted: dict[StageLink, tuple[Tensor, Callable[[], object]]] = {}
        self._leaving: list[tuple[PendingMessage, Tensor]] = []
        self.sent_bytes = 0

    @property
    def matches_tags(self) -> bool:
        """True if receives can be posted early, because the transport matches messages by tag."""
        return self._world.backend == "gloo"

    def send(self, edge: StageLink, tensors: list[Tensor], note: Any) -> None:
        """Start sending and return immediately. `note` is JSON that rarely changes, and is never modified in place."""
        known = self._sent.setdefault(edge, _Known())
        form = [(tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors]
        if form != known.form or note != known.note:
            known.form, known.note = form, note
            self._describe(edge, known, layout=[_form(tensor) for tensor in tensors])
        buffer = torch.empty(known.num_bytes, dtype=torch.uint8, device=self._device)
        buffer[:8].zero_()
        for place, tensor in zip(_views(buffer, known.layout), tensors, strict=True):
            place.copy_(tensor.detach())
        self._start(edge, buffer)

    def _describe(self, edge: StageLink, known: _Known, *, layout: list[Any]) -> None:
        """Announce that the layout changes, and send the new one."""
        head = torch.zeros(known.num_bytes, dtype=torch.uint8, device=self._device)
        text = json.dumps([known.note, layout], separators=(",", ":"))
        body = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(self._device)
        head[:8].view(torch.int64)[0] = body.numel()
        self._start(edge, head)
        self._start(edge, body)
        known.layout, known.num_bytes = layout, _num_bytes(layout)

    def expect(self, edge: StageLink) -> None:
        """Post the next receive on a link, so that the transfer overlaps with compute."""
        known = self._heard.setdefault(edge, _Known())
        self._posted[edge] = self._post(edge, known.num_bytes)

    def receive(self, edge: StageLink) -> tuple[list[Tensor], Any]:
        """Wait for the next message on a link; return its tensors, which are views of one buffer, and its note."""
        if edge not in self._posted:
            self.expect(edge)
        known = self._heard[edge]
        buffer, wait = self._posted.pop(edge)
        wait()
        changed = int(buffer[:8].view(torch.int64)[0])
        if changed:
            body, wait = self._post(edge, changed)
            wait()
            known.note, known.layout = json.loads(bytes(body.cpu().numpy()))
            known.num_bytes = _num_bytes(known.layout)
            buffer, wait = self._post(edge, known.num_bytes)
            wait()
        if self._device != self._world.device:
            buffer = buffer.to(self._world.device)
        return list(_views(buffer, known.layout)), known.note

    def is_expected(self, edge: StageLink) -> bool:
        """Return whether a receive is posted on this link."""
        return edge in self._posted

    def pause(self, *, sent_on: Iterable[StageLink]) -> None:
        """Cancel the posted receives of both sides: each side sends an empty message on its outgoing links.

        Both sides call this at the same point in their programs.
        """
        for edge in sent_on:
            known = self._sent[edge]
            buffer = torch.zeros(known.num_bytes, dtype=torch.uint8, device=self._device)
            buffer[:8].view(torch.int64)[0] = _NOTHING
            self._start(edge, buffer)
        for edge in list(self._posted):
            buffer, wait = self._posted.pop(edge)
            wait()
            assert int(buffer[:8].view(torch.int64)[0]) == _NOTHING, "both sides cancel at the same point"
        self.finish()

    def finish(self) -> None:
        """Wait until all sends have completed."""
        for work, _ in self._leaving:
            work.wait()
        self._leaving.clear()

    def _start(self, edge: StageLink, buffer: Tensor) -> None:
        self._leaving = [(work, kept) for work, kept in self._leaving if not work.is_completed()]
        work = self._world.start_send(buffer, to=edge.peer, tag=self._first_tag + edge.tag)
        self._leaving.append((work, buffer))
        self.sent_bytes += buffer.numel()

    def _post(self, edge: StageLink, num_bytes: int) -> tuple[Tensor, Callable[[], object]]:
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return buffer, self._world.start_receive(buffer, source=edge.peer, tag=self._first_tag + edge.tag).wait


def _form(tensor: Tensor) -> list[Any]:
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


def _size(form: list[Any]) -> int:
    dtype: torch.dtype = getattr(torch, form[0])
    return int(math.prod(form[1])) * dtype.itemsize


def _num_bytes(layout: list[Any]) -> int:
    return HEAD_BYTES + sum(_aligned(_size(form)) for form in layout)


def _aligned(size: int) -> int:
    return -(-size // ALIGNED_BYTES) * ALIGNED_BYTES


def _views(buffer: Tensor, layout: list[Any]) -> Iterator[Tensor]:
    offset = HEAD_BYTES
    for form in layout:
        kind, shape, stride = form
        size = _size(form)
        flat = buffer[offset : offset + size].view(getattr(torch, kind))
        yield flat.as_strided(shape, stride) if stride else flat.view(shape)
        offset += _aligned(size)
