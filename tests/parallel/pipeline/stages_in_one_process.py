"""The stages of a model in one process, each in its own model object as on separate ranks, and the whole model."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from paceline.parallel.pipeline.chain.split import StageSplit
from paceline.parallel.pipeline.chain.stages import StageOutput
from paceline.parallel.pipeline.graph.split import GraphStageSplit
from paceline.torch_internals.rng import RandomStreams

Loss = Callable[[nn.Module, int], Tensor]


def streamed(model: nn.Module) -> RandomStreams:
    streams = RandomStreams(seed=3)
    streams.attach(model)
    return streams


def alone(model: nn.Module, *, loss: Loss, num_micro: int) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """One process: each microbatch's loss, the sums of gradients, and the buffers."""
    model = copy.deepcopy(model)
    streams, losses = streamed(model), []
    for microbatch in range(num_micro):
        streams.enter(step=0, microbatch=microbatch)
        losses.append(loss(model, microbatch))
        losses[-1].backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return losses, gradients, dict(model.named_buffers())


class Ranks:
    """`staged(model, index)` cuts one copy, which runs the stage of that index."""

    def __init__(
        self,
        model: nn.Module,
        *,
        cut: StageSplit | GraphStageSplit,
        loss: Loss,
        staged: Callable[[nn.Module, int], Any],
    ) -> None:
        self.cut, self._loss = cut, loss
        self.models = [copy.deepcopy(model) for _ in cut.stages]
        self.streams = [streamed(each) for each in self.models]
        self.stages = [staged(each, index) for index, each in enumerate(self.models)]

    def forward(self, microbatch: int) -> tuple[list[Any], list[StageOutput | None]]:
        received, sent, taken = None, [], []
        for index, stages in enumerate(self.stages):
            self.streams[index].enter(step=0, microbatch=microbatch)
            taken.append(received)
            output = stages.run(index, received, lambda m=self.models[index]: self._loss(m, microbatch))
            sent.append(output)
            received = output.as_stage_input() if isinstance(output, StageOutput) else None
        return sent, taken

    def train(self, microbatch: int) -> Tensor:
        sent, taken = self.forward(microbatch)
        sent[-1].backward()
        for out, then in zip(sent[-2::-1], taken[:0:-1], strict=True):
            pairs = [(t, r.grad) for t, r in zip(out.tensors, then.tensors, strict=True) if r.grad is not None]
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        return sent[-1]

    def gradients(self) -> dict[str, Tensor]:
        total: dict[str, Tensor] = {}
        for part, model in zip(self.cut.stages, self.models, strict=True):
            for name, p in model.named_parameters():
                if p.grad is not None:
                    assert name in part.parameters
                    total[name] = total[name] + p.grad if name in total else p.grad
        return total
