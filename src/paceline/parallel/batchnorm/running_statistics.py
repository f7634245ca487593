"""BatchNorm running statistics that equal those of one process, updated microbatch by microbatch.

Norm layers are not replaced: each updates its statistics with its momentum whenever it is called. So a process that
runs all microbatches in order needs no correction. If several ranks run them, each microbatch starts from the values
before the step, and the values after each call are recorded on a tape. An update is linear, new = (1 - w) * old +
w * batch, so the result for one old value follows from the result for another. At the end of the step all tape rows
are gathered on every rank and applied in microbatch order. The result is bitwise equal for any number of ranks and any
assignment of microbatches.

A forward that reads or changes state of earlier microbatches is not linear. Then the step is rerun, and the ranks run
their forwards sequentially (`sequential_forwards`).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.errors import DesyncError
from paceline.parallel.batchnorm.norm_kernel_calls import KernelWatch, is_standard, standard_calls, statistics_of
from paceline.parallel.batchnorm.norm_tape import (
    NormTape,
    TapedCalls,
    batches_tracked,
    folded_statistics,
    norms_with_statistics,
    open_tape,
)
from paceline.parallel.batchnorm.order_dependence import OrderNeed
from paceline.parallel.batchnorm.sequential_forwards import StatisticsRelay
from paceline.parallel.batchnorm.statistics_reads import AccessPlaces, StatisticsReads
from paceline.parallel.module_access.forward_counters import ForwardNumbers, NumberTape
from paceline.parallel.module_access.tensor_access import equal_tensors
from paceline.torch_internals.private_api import NormBase, in_backward

_RESTS, _TRAINS, _READS, _MOVES, _MOVES_ON, _REPEATS, _BYPASSED, _SHOWS = range(8)
_FLAGS = 8


class MicrobatchStatistics:
    """The tape of a model's running statistics.

    Call `begin_step`, then `set_microbatch(j)` before and `end_forward(j)` after each forward, then `fold`.

    `in_order`: this process runs its microbatches sequentially, each forward and backward. `can_wait`: a forward may
    wait for another rank's forward, since forwards don't communicate. `over_batch`: a forward can't wait, since the
    loss is over the full batch. `is_compiled`: reads in a forward can't be watched. `exact`: one rank folds the tape as
    several ranks do, for the same bits. Outside a step (an evaluation, a loaded checkpoint, user code that sets
    statistics) nothing is recorded or refused.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        world: World,
        exact: bool = False,
        in_order: bool = True,
        can_wait: bool = False,
        over_batch: bool = False,
        compiles: bool = False,
    ) -> None:
        self._world = world
        self._can_wait, self._over_batch = can_wait and not over_batch, over_batch
        self._relay: StatisticsRelay | None = None
        self._is_relayed = False
        self.notes: list[str] = []
        self._told: set[str] = set()
        self._has_new_place = False
        self._now, self._counts = 0, True
        self._has_run = self._is_checked = False
        self._layers = [open_tape(name, module) for name, module in norms_with_statistics(model)]
        self._records = world.world_size > 1 or exact or not in_order
        self._numbers = _numbers_of(model, world=world, layers=self._layers) if self._records else None
        self._reads: StatisticsReads | None = None
        self._is_watched = bool(self._layers) and self._records and not compiles
        watched = {layer.module: layer for layer in self._layers if self._is_watched}

        def seen(norm: NormBase) -> None:
            watched[norm].is_shown = True  # stays set, because later steps may not be watched

        self._seen = seen
        self._accesses, self._is_used = AccessPlaces(watched, seen=seen), False
        self._handles = [
            handle
            for layer in (self._layers if self._records else [])
            for handle in (
                layer.module.register_forward_pre_hook(self._before(layer)),
                layer.module.register_forward_hook(self._after(layer), always_call=True),
            )
        ]

    @property
    def is_sequential(self) -> bool:
        """True if forwards run one after another over all ranks, in the order of one process."""
        return self._relay is not None

    def begin_step(self, *, num_micro: int = 0) -> None:
        """Start a step; when repeating one, restore statistics and numbers in module attributes first.

        `num_micro` is the number of microbatches on all ranks; if it is 0, no forward waits for another.
        """
        if self._numbers is not None:
            self._numbers.begin(num_micro=0 if self._over_batch else num_micro, again=self._has_run)
        for layer in self._layers:
            if self._has_run:
                layer.write(layer.before, 0)
            elif layer.module.running_mean is not None:
                layer.before, layer.count = statistics_of(layer.module), batches_tracked(layer.module)
            layer.begins_training = layer.module.training
            layer.is_read = layer.is_repeated = layer.is_moved = False
            layer.rows.clear()
            layer.bumps.clear()
            layer.look()
        self._has_run = False
        self._accesses.is_armed = num_micro > 0
        self._is_relayed = self._relay is not None and num_micro > 0
        if self._relay is not None:
            self._relay.begin(num_micro=num_micro)

    def set_microbatch(self, microbatch: int, *, has_samples: bool = True) -> None:
        """Set the microbatch of the next forward or backward; without samples its statistics are not recorded."""
        is_other = not self._has_run or (has_samples and microbatch != self._now)
        if self._is_relayed and has_samples:
            assert self._relay is not None
            self._relay.receive(microbatch)
            for layer in self._layers:
                layer.start_momentum()
        elif self._records and is_other and has_samples:
            for layer in self._layers:
                self._leave(layer, by_value=not self._is_checked)
                self._enter(layer, microbatch)
        if self._numbers is not None:
            self._numbers.at(microbatch if has_samples else None, sets=not self._is_relayed)
        self._has_run = True
        self._now, self._counts = microbatch if has_samples else self._now, has_samples

    def recording_context(self) -> AbstractContextManager[object]:
        """Return a context for a forward and its loss, or a backward, that detects reads of norm statistics.

        It is active in the first step, in each step after one in which user code accessed the statistics, and in a
        rerun because of an access from a new place in the code.
        """
        self._reads = None
        if not self._is_watched or self._is_relayed or (self._is_checked and not self._is_used):
            return nullcontext()
        layers = {layer.module: layer for layer in self._layers if layer.is_there}
        self._reads = StatisticsReads(layers, is_inside=lambda norm: layers[norm].is_inside, seen=self._seen)
        return self._reads

    def end_forward(self, microbatch: int) -> None:
        """Send the statistics on after this microbatch's forward, if forwards run in order."""
        if self._is_relayed and self._counts:
            assert self._relay is not None
            for layer in self._layers:
                layer.end_momentum()
            self._relay.send(microbatch)

    def fold(self, *, num_micro: int) -> bool:
        """Set every norm's statistics to those of one process after `num_micro` microbatches.

        Return False, on all ranks, if they can't be computed: the step must be repeated with sequential forwards.

        Raises:
            DesyncError: a layer is in training mode on some ranks and in eval mode on others.
            JobError: statistics were written or used in a way that a single rank can't reproduce.
        """
        self._accesses.is_armed = False
        if self._numbers is not None:
            for layer in self._layers:
                self._leave(layer, by_value=not self._is_checked)
                layer.end_momentum()
            calls, is_settled = self._calls(num_micro)
            if not (is_settled or self._numbers.agree(relayed=self._is_relayed)) or self._must_look_again():
                return False
            if not self._is_settled(calls, num_micro=num_micro):
                return False
            self._tell(self._numbers.end(relayed=self._is_relayed))
        self._has_run = False
        return True

    def undo(self) -> None:
        """Restore the statistics from before the step, because it was skipped."""
        for layer in self._layers:
            layer.write(layer.before, 0)
        self._has_run = False

    def new_notes(self) -> list[str]:
        """Return the notes for the user that were not returned before."""
        notes, self.notes = self.notes, []
        return notes

    def close(self) -> None:
        """Remove the module hooks."""
        for handle in self._handles:
            handle.remove()
        self._accesses.close()

    def _is_settled(self, calls: Sequence[TapedCalls], *, num_micro: int) -> bool:
        """Set all statistics to those after the step; return False if it must be rerun with sequential forwards."""
        assert self._numbers is not None
        for one in calls:
            if one.is_split:
                self._refuse_modes(one.layer)
        needs = [one.need for one in calls if one.need.is_any and (num_micro > 1 or one.need.is_bypassed)]
        if not self._can_wait or any(need.is_repeated for need in needs):
            for need in needs:
                need.refuse(over_batch=self._over_batch)
                self._tell(need.stale)
        elif needs and not self._is_relayed:
            modules = [layer.module for layer in self._layers]
            self._relay = StatisticsRelay(modules, numbers=self._numbers, world=self._world)
            self._tell(f"{needs[0].why}: ranks run their forwards one after another, as one process does")
            return False
        self._meet(calls, still_ordered=bool(needs))
        return True

    def _enter(self, layer: NormTape, microbatch: int) -> None:
        """Load the statistics that a microbatch starts or continues with."""
        if layer.rows:
            layer.write(layer.states(microbatch)[-1], layer.bumps.get(microbatch, 0))
        if not layer.rows.get(microbatch):
            layer.end_momentum()
            layer.start_momentum()

    def _leave(self, layer: NormTape, *, by_value: bool = False) -> None:
        """Detect writes by code around the norm.

        If the code restored the statistics from before a call, drop that call. Any other write can be reproduced only
        with sequential forwards. `by_value`: compare values, since `F.batch_norm` does not change versions; this is
        slow, so it is done only in the first step.
        """
        if self._is_relayed or not layer.is_there or not (by_value or layer.was_touched()):
            return
        now, states = statistics_of(layer.module), layer.states(self._now)
        kept = next((place for place in reversed(range(len(states))) if equal_tensors(states[place], now)), None)
        if kept is None:
            self._bypass(layer)
        elif kept < len(states) - 1:
            del layer.rows[self._now][kept:]
            if layer.count is not None and layer.module.num_batches_tracked is not None:
                layer.bumps[self._now] = int(layer.module.num_batches_tracked) - int(layer.count)
        layer.look()

    def _bypass(self, layer: NormTape) -> None:
        """Record that the statistics were written by another rule than the running average."""
        if not self._can_wait:
            OrderNeed(name=layer.name, is_bypassed=True).refuse(over_batch=self._over_batch)
        layer.is_bypassed = True  # stays set, because only the first step compares values

    def _calls(self, num_micro: int) -> tuple[list[TapedCalls], bool]:
        """Return each norm's calls in each microbatch on all ranks, and whether all numbers changed as expected."""
        assert self._numbers is not None
        told = torch.zeros(len(self._layers) + 1, 2 * num_micro + _FLAGS, dtype=torch.int64)
        told[-1, 0] = int(not self._numbers.is_settled(relayed=self._is_relayed))
        was_watched = not self._is_checked or self._is_used
        told[-1, 1] = int(self._accesses.is_new and not (was_watched or self._is_relayed))
        self._is_used, self._is_checked = self._accesses.is_used, True
        self._accesses.is_new = self._accesses.is_used = False
        for layer, row in zip(self._layers, told, strict=False):
            flags = row[2 * num_micro :]
            flags[_TRAINS if layer.begins_training else _RESTS] = 1
            flags[_READS], flags[_REPEATS] = int(layer.is_read), int(layer.is_repeated)
            flags[_MOVES], flags[_MOVES_ON] = int(layer.is_moved), int(layer.moves > 1)
            flags[_BYPASSED], flags[_SHOWS] = int(layer.is_bypassed), int(layer.is_shown)
            for index, calls in layer.rows.items():
                row[index], row[num_micro + index] = len(calls), layer.bumps.get(index, 0)
        if self._world.world_size > 1:
            told = self._world.all_reduce(told.to(self._world.device), op="max").cpu()
        is_unsettled, self._has_new_place, *_ = map(bool, told[-1].tolist())
        found = []
        for layer, row in zip(self._layers, told.tolist(), strict=False):
            flags = row[2 * num_micro :]
            ran = sum(row[:num_micro]) > 0
            need = OrderNeed(
                name=layer.name,
                reads=ran and flags[_READS] > 0,
                moves=ran and flags[_MOVES] > 0,
                moves_on=ran and flags[_MOVES_ON] > 0,
                is_shown=ran and flags[_SHOWS] > 0,
                is_bypassed=flags[_BYPASSED] > 0,
                is_repeated=flags[_REPEATS] > 0,
            )
            is_split = bool(flags[_RESTS] and flags[_TRAINS])
            found.append(TapedCalls(layer, row[:num_micro], row[num_micro : 2 * num_micro], need, is_split))
        return found, not is_unsettled

    def _must_look_again(self) -> bool:
        """Watch the next forwards if new code accessed statistics; return True if this step must be rerun for it."""
        self._is_used = self._is_used or self._has_new_place
        return self._has_new_place and self._can_wait

    def _meet(self, calls: Sequence[TapedCalls], *, still_ordered: bool) -> None:
        if self._is_relayed and self._relay is not None:
            self._relay.spread()
            self._relay = self._relay if still_ordered else None
            return
        uses = [one for one in calls if any(one.by_microbatch + one.bumps)]
        for one, tape in zip(uses, self._gathered(uses), strict=True):
            one.layer.write(folded_statistics(one, tape), sum(one.bumps))

    def _tell(self, note: str) -> None:
        if note and note not in self._told and self._world.world_size > 1:
            self._told.add(note)
            self.notes.append(note)

    def _refuse_modes(self, layer: NormTape) -> None:
        modes = self._world.gather_json(layer.begins_training)
        resting = [str(rank) for rank, is_live in enumerate(modes) if not is_live]
        raise DesyncError(
            f"{layer.name} is in eval mode on rank {', '.join(resting)} and in training mode on the others.",
            cause="code that calls eval() or train() on some ranks only",
            hint="the same mode on every rank; to freeze its statistics, eval() on all",
        )

    def _gathered(self, uses: Sequence[TapedCalls]) -> list[Tensor]:
        """Return the tapes with all ranks' rows. A row is zero on all ranks but one, so the sum is exact."""
        if not uses:
            return []
        first = uses[0].layer.before
        widths = [[count * calls.layer.width for count in calls.by_microbatch] for calls in uses]
        dtype = torch.promote_types(first.dtype, torch.float32)
        flat = torch.zeros(sum(map(sum, widths)), dtype=dtype, device=first.device)
        tapes = list(flat.split([sum(each) for each in widths]))
        for calls, each, tape in zip(uses, widths, tapes, strict=True):
            for index, row in enumerate(tape.split(each)):
                for place, (after, weight) in zip(
                    row.view(-1, calls.layer.width), calls.layer.rows.get(index, ()), strict=False
                ):
                    place[:-1], place[-1] = after, weight
        self._world.all_reduce(flat)
        return tapes

    def _before(self, layer: NormTape) -> Callable[[nn.Module, tuple[object, ...]], None]:
        def hook(module: nn.Module, inputs: tuple[object, ...]) -> None:
            if module is not layer.module:
                return
            layer.is_inside = True
            if not (self._has_run and layer.is_there):
                return
            if self._counts and not torch.compiler.is_compiling():
                self._leave(layer)
            if not is_standard(layer.module):
                layer.watches.append(KernelWatch(layer.module, () if self._is_checked else inputs))

        return hook

    def _after(self, layer: NormTape) -> Callable[[nn.Module, object, object], None]:
        def hook(module: nn.Module, _: object, output: object) -> None:
            if module is layer.module:  # a copy of the model has the hooks of the original
                self._take_down(layer, has_output=output is not None)
                layer.is_inside = False
                if self._reads is not None:
                    self._reads.leave(layer.module)

        return hook

    def _take_down(self, layer: NormTape, *, has_output: bool) -> None:
        watch = layer.watches.pop().ended() if layer.watches else None
        has_run = has_output or in_backward()  # checkpointing may stop a recomputed forward before its end
        if not (self._has_run and has_run and self._counts and layer.is_there):
            return
        calls, bumps, reads = standard_calls(layer.module) if watch is None else (watch.calls, watch.bumps, watch.reads)
        layer.is_read = layer.is_read or reads
        if watch is not None and watch.is_unknown:
            self._bypass(layer)
        if calls:
            layer.is_repeated = layer.is_repeated or in_backward()
            layer.rows.setdefault(self._now, []).extend(calls)
            layer.bumps[self._now] = layer.bumps.get(self._now, 0) + bumps
            if not torch.compiler.is_compiling():
                layer.look()


def build_tapes(
    model: nn.Module,
    *,
    world: World,
    enabled: bool,
    exact: bool,
    in_order: bool,
    can_wait: bool,
    over_batch: bool,
    compiles: bool,
) -> list[MicrobatchStatistics | NumberTape]:
    """Return the tapes for this model's steps; an empty list if nothing can differ from one process."""
    if enabled and any(norms_with_statistics(model)):
        tape = MicrobatchStatistics(
            model=model,
            world=world,
            exact=exact,
            in_order=in_order,
            can_wait=can_wait,
            over_batch=over_batch,
            compiles=compiles,
        )
        return [tape]
    return [NumberTape(model, world=world, over_batch=over_batch)] if world.world_size > 1 or exact else []


def _numbers_of(model: nn.Module, *, world: World, layers: Sequence[NormTape]) -> ForwardNumbers:
    momentum = [f"{layer.name}.momentum" for layer in layers]
    return ForwardNumbers(model, world=world, always=bool(layers), reported_elsewhere=momentum)
