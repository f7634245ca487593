"""Activations take one message each while their shapes stay the same; a change sends a new description."""

import pytest
import torch
from torch import Tensor

from paceline.comm.process_group import World
from paceline.step.pipeline.p2p import StageChannel, StageLink

EDGE = StageLink(peer=1, tag=4)


class Loop(StageChannel):
    """What is sent is what is received."""

    def __init__(self) -> None:
        super().__init__(World.alone())
        self.line: list[Tensor] = []
        self.sizes: list[int] = []

    def _start_send(self, link: StageLink, buffer: Tensor) -> None:
        self.line.append(buffer.clone())
        self.sizes.append(buffer.numel())

    def _start_receive(self, link: StageLink, num_bytes: int) -> tuple[Tensor, object]:
        buffer = torch.empty(num_bytes, dtype=torch.uint8)

        def wait() -> None:
            sent = self.line.pop(0)
            assert sent.numel() == num_bytes, "both sides know the length of the next message"
            buffer.copy_(sent)

        return buffer, wait


KINDS = {
    "float": torch.randn(3, 5),
    "half": torch.randn(7).bfloat16(),
    "flags": torch.tensor([True, False, True]),
    "numbers": torch.arange(6).reshape(2, 3),
    "one": torch.tensor(2.5),
    "none": torch.zeros(0, 4),
    "turned": torch.randn(2, 3, 4).transpose(1, 2),
    "last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "spread": torch.randn(1, 4).expand(3, 4),
}


def test_every_kind_of_tensor_arrives_as_it_was() -> None:
    wire = Loop()
    for _ in range(2):
        wire.send(EDGE, list(KINDS.values()), {"note": [1, None]})
        found, note = wire.receive(EDGE)
        assert note == {"note": [1, None]} and not wire.line
        for (name, sent), there in zip(KINDS.items(), found, strict=True):
            assert there.dtype == sent.dtype and torch.equal(there, sent), name
            assert there.stride() == sent.stride() or name == "spread", name
            assert there.data_ptr() % 64 == 0 or not there.numel(), "aligned as torch's own: kernels give the same bits"


@pytest.mark.parametrize("early", [False, True])
def test_a_description_is_sent_only_when_it_changes(early: bool) -> None:
    wire = Loop()
    for rows, messages in ((4, 3), (4, 1), (4, 1), (2, 3), (2, 1), (4, 3)):
        if early:
            wire.post_receive(EDGE)
        wire.sizes.clear()
        wire.send(EDGE, [torch.full((rows, 3), float(rows))], None)
        assert len(wire.sizes) == messages
        assert torch.equal(wire.receive(EDGE)[0][0], torch.full((rows, 3), float(rows)))
