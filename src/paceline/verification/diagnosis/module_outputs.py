"""Every module's output in one microbatch, compared between the layout and one process to find the first difference."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.types import StepInput
from paceline.parallel.context_parallel.sequence_sharding import SequenceSharding
from paceline.parallel.tensor_parallel.collectives import piece_of
from paceline.parallel.tensor_parallel.sharded_tensor import ShardPropagatingTensor
from paceline.torch_internals.private_api import in_backward, tree_flatten
from paceline.trainer.setup.build_training_setup import TrainingSetup
from paceline.verification.diagnosis.rank_names import RankNames
from paceline.verification.diagnosis.rerun import ReferenceRerun
from paceline.verification.tensor_distance import to_double

_MOST = 1 << 24
_TOLERANCE = 2e-3
_SHAPE = 1e-3
Key = tuple[int, str, int]  # microbatch, module, number of the call


@dataclass(kw_only=True)
class ModuleOutputs:
    """The outputs of every module in the first microbatches, in the order of execution."""

    microbatches: int
    outputs: dict[Key, Tensor] = field(default_factory=dict)
    looked_up: dict[Key, Tensor] = field(default_factory=dict)
    _now: int = -1
    _size: int = 0
    _calls: dict[tuple[int, str], int] = field(default_factory=dict)

    def at(self, microbatch: int) -> int:
        """Begin a microbatch, and return its index."""
        self._now = microbatch
        return microbatch

    @contextmanager
    def over(self, model: nn.Module) -> Iterator[None]:
        """Record the outputs while the model runs."""
        handles = [module.register_forward_hook(self._hook(name)) for name, module in model.named_modules() if name]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str) -> Any:
        def see(module: nn.Module, args: Any, output: Any) -> None:
            if not 0 <= self._now < self.microbatches or in_backward():
                return
            call = self._calls.get((self._now, name), 0)
            self._calls[self._now, name] = call + 1
            tensor = next((leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)), None)
            if tensor is None or not tensor.is_floating_point() or self._size > _MOST:
                return
            kept = tensor if isinstance(tensor, ShardPropagatingTensor) else tensor.detach().clone()
            self._size += kept.numel()
            self.outputs[self._now, name, call] = kept
            if isinstance(module, nn.Embedding) and args:
                self.looked_up[self._now, name, call] = args[0].detach().clone()

        return see


def watch_reference(inquiry: ReferenceRerun, *, model: nn.Module, microbatches: int) -> ModuleOutputs:
    """Return the module outputs of one process."""
    watch = ModuleOutputs(microbatches=microbatches)
    with watch.over(model):
        inquiry.again(stream=watch.at)
    return watch


def watch_layout(built: TrainingSetup, given: StepInput, *, microbatches: int) -> ModuleOutputs:
    """Return this rank's module outputs, of the microbatches that it runs. Every rank must call this."""
    watch, streams = ModuleOutputs(microbatches=microbatches), built.step.replica.streams
    enter = streams.enter

    def entered(*, step: int, microbatch: int) -> None:
        watch.at(microbatch)
        enter(step=step, microbatch=microbatch)

    streams.enter = entered  # type: ignore[method-assign]
    try:
        with watch.over(built.model):
            built.step.gradients(given)
    finally:
        del streams.enter
    return watch


def first_apart(built: TrainingSetup, mine: ModuleOutputs, right: ModuleOutputs | None) -> dict[str, Any] | None:
    """Return the first module, in one process's order, whose output differs, and the ranks.

    `module` is empty if all outputs are right; the result is None if nothing could be compared. Every rank must call
    this; `right` is rank 0's. Outputs without a counterpart are skipped.
    """
    world = built.world
    keys = world.share_json(None if right is None else [[*key, list(t.shape)] for key, t in right.outputs.items()])
    previous, bad = "", list[int]()
    compared = 0
    for microbatch, name, call, shape in keys:
        own = mine.outputs.get((microbatch, name, call))
        kind = next((t.dtype for t in built.model.parameters() if t.is_floating_point()), torch.float32)
        sent = torch.empty(shape, dtype=kind, device=world.device)
        if right is not None:
            sent.copy_(right.outputs[microbatch, name, call])
        world.broadcast(sent.contiguous())
        pair = None if own is None else _aligned(built, own, sent)
        told = world.gather_json(None if pair is None else _is_same(*pair))
        compared += sum(same is not None for same in told)
        bad = [rank for rank, same in enumerate(told) if same is False]
        if bad:
            seen = [rank for rank, same in enumerate(told) if same is not None]
            ids = mine.looked_up.get((microbatch, name, call))
            why = world.gather_json("" if pair is None or _is_same(*pair) else _why(built, name, *pair, ids))
            return {
                "module": name,
                "ranks": bad,
                "of": seen,
                "before": previous,
                "why": next((text for text in why if text), ""),
                "compared": compared,
            }
        if any(told):
            previous = name
    return {"module": "", "compared": compared} if compared else None


def _aligned(built: TrainingSetup, own: Tensor, whole: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return this rank's output and what it should be; None if they can't be compared."""
    if isinstance(own, ShardPropagatingTensor):
        if own.whole != tuple(whole.shape):
            return None
        whole, own = piece_of(whole, own.cut, own.wire.rank), own.local.detach()
    if own.shape != whole.shape:
        cut = _sequence(built, own, whole)
        if cut is None:
            return None
        whole = cut
    return (to_double(own), to_double(whole)) if own.shape == whole.shape else None


def _is_same(own: Tensor, whole: Tensor) -> bool:
    return float((own - whole).norm()) <= _TOLERANCE * float(whole.norm())


def _why(built: TrainingSetup, name: str, own: Tensor, right: Tensor, ids: Tensor | None) -> str:
    """Return how the error looks: a factor, the bias added again, the rows of one rank."""
    error, module = own - right, built.model.get_submodule(name)
    bias = getattr(module, "bias", None)
    if isinstance(bias, Tensor) and bias.shape == right.shape[-1:]:
        times = _factor(error, bias.detach().double().expand_as(right))
        if times is not None:
            return f"its bias is added {1 + times:.4g} times{_degree(built, 1 + times)}"
    times = _factor(own, right)
    if times is not None:
        return f"it is {times:.4g} times what it should be{_degree(built, times)}"
    weight = f"{name}.weight"
    if ids is None or weight not in built.weights.names or ids.shape != right.shape[:-1]:
        return ""
    wrong = ids[error.norm(dim=-1) > _TOLERANCE * right.norm(dim=-1)].unique()
    for rank, part in enumerate(built.weights.parts(weight)):
        held = [(box.whole[0], box.whole[0] + box.size[0]) for box in part.boxes]
        if not part.is_all and all(any(low <= int(row) < high for low, high in held) for row in wrong):
            return f"the rows that are looked up wrongly are all on rank {rank} ({held[0][0]} to {held[-1][1] - 1})"
    return ""


def _factor(found: Tensor, of: Tensor) -> float | None:
    size = float((of * of).sum())
    factor = float((found * of).sum()) / size if size else 0.0
    return factor if size and float((found - factor * of).norm()) <= _SHAPE * float(found.norm()) else None


def _degree(built: TrainingSetup, factor: float) -> str:
    mesh = built.worlds.mesh
    axes = [axis for axis in mesh.split if abs(factor - mesh.size(axis)) < _SHAPE]
    return f", the {' or '.join(axes)} degree" if axes else ""


def _sequence(built: TrainingSetup, own: Tensor, whole: Tensor) -> Tensor | None:
    """Return this rank's part of the sequence, if the sequence is sharded."""
    cp = built.worlds.cp
    odd = [d for d in range(min(own.dim(), whole.dim())) if own.shape[d] != whole.shape[d]]
    if cp.world_size == 1 or own.dim() != whole.dim() or len(odd) != 1:
        return None
    cut = SequenceSharding(length=whole.shape[odd[0]], ranks=cp.world_size)
    return cut.take(whole, dim=odd[0], rank=cp.rank)


def watched_cause(
    found: Mapping[str, Any], *, places: RankNames | None, loss_wrong: bool, remat: bool, last: str
) -> str:
    """Return what the module outputs tell, if no weighting of gradients explains the fault."""
    if found["module"]:
        before = f" {found['before']} is right;" if found["before"] else ""
        where = _where(found, places)
        why = found["why"] and f" ({found['why']})"
        return (
            "the forward gives a different output than one process, from the same weights and samples, first at "
            f"{found['module']}{where}{why}:{before} the fault is in it or in the operations right before it"
        )
    if loss_wrong:
        axes = [axis for axis in ("tp", "cp") if places is not None and places.mesh.size(axis) > 1]
        cut = {
            "tp": "logits that are split over the vocabulary (tp)",
            "cp": "labels at the borders of the sequence parts (cp)",
        }
        what = ", ".join(["targets, labels and their count", *(cut[axis] for axis in axes)])
        return f"every module's output is right but the loss is not: check the inputs of the loss: {what}"
    again = (
        "remat recomputes blocks in backward with different values than in forward (dropout's random numbers, a "
        "buffer, a different autocast); or "
        if remat
        else ""
    )
    where = f", first at {last}, the last parameter in the model's order that differs" if last else ""
    return (
        f"the forward is right, every module's output and the loss; backward, or the gradient reduction, is not: "
        f"{again}the communication of the layout in backward{where}"
    )


def quiet_where(found: Mapping[str, Any], *, places: RankNames | None, loss_wrong: bool, remat: bool) -> str:
    """Return where different random numbers are drawn."""
    if found["module"]:
        return f"first at {found['module']}{_where(found, places)}"
    if remat and not loss_wrong:
        return "only in backward, where remat recomputes blocks: the mask differs from forward's"
    return ""


def _where(found: Mapping[str, Any], places: RankNames | None) -> str:
    if places is None:
        return f", on rank {', '.join(map(str, found['ranks']))}"
    return places.words(found["ranks"], of=found["of"])
