"""Pipeline stages under exact context parallelism: each sequence shard of this rank runs through a stage by itself.

A message between stages has the tensors of all shards that this rank computes, one shard after another.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from paceline.parallel.context_parallel.exact_context import ExactContextParallel
from paceline.parallel.pipeline.chain.stages import StageOutput
from paceline.parallel.pipeline.pipeline_model import PipelineModel
from paceline.torch_internals.private_api import run_backward


class ShardStages:
    """The forwards and backwards of this rank's sequence shards at its stages."""

    def __init__(self, context: ExactContextParallel, *, pipeline_model: PipelineModel) -> None:
        self._context, self._stages = context, pipeline_model.stages
        self._positions: dict[int, int] = {}  # by the id of a stage's output: the position of its shard on this rank

    def forward(
        self,
        call: Callable[[int], Any],
        *,
        stage: int,
        received: StageOutput | None,
        length: int,
        is_training: bool = False,
    ) -> StageOutput | list[Any]:
        """Run `call(position)` at a stage for each shard, on its part of the received message.

        Return the message for the next stage, or on the last stage the list of results. `length` is the length of the
        full sequences.
        """
        parts = [None] * len(self._context.shard_numbers) if received is None else _split(received)

        def run_shard(position: int) -> Any:
            return self._stages.run(stage, parts[position], partial(call, position))

        results = self._context.run(run_shard, is_training=is_training, length=length)
        for position, result in enumerate(results):
            outputs = result.tensors if isinstance(result, StageOutput) else [result]
            self._positions.update((id(output), position) for output in outputs if isinstance(output, Tensor))
        return _join(results) if isinstance(results[0], StageOutput) else results

    def backward(
        self, outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], contexts: Sequence[Callable[[], Any]]
    ) -> None:
        """Run the backward of each shard from its outputs; `contexts` open the context of each shard's backward."""
        pairs: list[list[tuple[Tensor, Tensor | None]]] = [[] for _ in contexts]
        for output, gradient in zip(outputs, gradients, strict=True):
            pairs[self._positions.pop(id(output))].append((output, gradient))

        def run_shard(position: int) -> None:
            with contexts[position]():
                run_backward([output for output, _ in pairs[position]], [gradient for _, gradient in pairs[position]])

        self._context.run(run_shard)


def _join(outputs: Sequence[StageOutput]) -> StageOutput:
    """Return one message with the tensors and descriptions of all shards."""
    return StageOutput(
        tensors=[tensor for output in outputs for tensor in output.tensors],
        spec=[[len(output.tensors), output.spec] for output in outputs],
    )


def _split(message: StageOutput) -> list[StageOutput]:
    """Return the parts of a message that `_join` has made."""
    parts, start = [], 0
    for num_tensors, spec in message.spec:
        parts.append(StageOutput(tensors=message.tensors[start : start + num_tensors], spec=spec))
        start += num_tensors
    return parts
