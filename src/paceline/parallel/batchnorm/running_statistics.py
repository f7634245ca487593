"""Keep BatchNorm's running statistics equal to those of one process, which updates them microbatch by microbatch.

Norm layers are not replaced: each updates its statistics with its momentum whenever it is called. So a process that
runs all microbatches in order needs no correction. If several ranks run the microbatches, each microbatch starts from
the values before the step, and the values after each call are recorded on a tape. An update is linear: new = (1 - w) *
old + w * batch. So the result for one old value follows from the result for another. At the end of the step all tape
rows are gathered on every rank and applied in microbatch order. The result is bitwise equal for any number of ranks and
any assignment of microbatches. A process without a tape may differ by rounding; in exact mode it has a tape too.

If a forward reads or changes state of earlier microbatches, the update is not linear. Then the step is rerun, and the
ranks run their forwards sequentially (`sequential_forwards`).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.errors import DesyncError
from paceline.parallel.batchnorm.norm_kernel_calls import (
    KernelWatch,
    copy_statistics,
    has_torch_forward,
    torch_norm_calls,
)
from paceline.parallel.batchnorm.norm_tape import (
    NormTape,
    TapedCalls,
    copy_batch_count,
    fold_statistics,
    norms_with_statistics,
    open_tape,
)
from paceline.parallel.batchnorm.order_dependence import OrderDependence
from paceline.parallel.batchnorm.sequential_forwards import StatisticsRelay
from paceline.parallel.batchnorm.statistics_reads import StatisticsAccesses, StatisticsReads
from paceline.parallel.module_access.forward_counters import ForwardNumbers, NumberRecorder
from paceline.parallel.module_access.tensor_access import equal_tensors
from paceline.torch_internals.private_api import NormBase, is_in_backward

(
    _EVAL_MODE,
    _TRAIN_MODE,
    _USES_EVAL_MODE,
    _MOMENTUM_CHANGES,
    _MOMENTUM_KEEPS_CHANGING,
    _IS_RECOMPUTED,
    _IS_BYPASSED,
    _IS_READ,
) = range(8)
_NUM_FLAGS = 8


class StatisticsRecorder:
    """The recorder of a model's running statistics.

    Call `begin_step`, then `set_microbatch(j)` before and `end_forward(j)` after each forward, then `fold`.

    `in_order`: this process ends the backward of a microbatch before the next forward. `can_wait`: a forward may wait
    for another rank's forward, since forwards don't communicate. `over_batch`: a forward can't wait, since the loss is
    over the full batch. `is_compiled`: reads in a forward can't be detected. `exact`: a single rank folds the tape too,
    so that it gets the same bits as several ranks. Outside a step (an evaluation, a loaded checkpoint, user code that
    sets statistics) nothing is recorded or refused.
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
        is_compiled: bool = False,
    ) -> None:
        self._world = world
        self._can_wait, self._over_batch = can_wait and not over_batch, over_batch
        self._relay: StatisticsRelay | None = None
        self._is_relayed = False  # the relay is used in this step
        self.notes: list[str] = []
        self._reported_notes: set[str] = set()
        self._has_new_access = False  # on any rank, user code accessed statistics from a new line
        self._microbatch, self._has_samples = 0, True
        self._has_run = self._is_checked = False  # a microbatch of this step has run; the first step is complete
        self._norm_tapes = [open_tape(name, module) for name, module in norms_with_statistics(model)]
        self._must_record = world.world_size > 1 or exact or not in_order
        self._numbers = (
            _make_forward_numbers(model, world=world, norm_tapes=self._norm_tapes) if self._must_record else None
        )
        self._reads: StatisticsReads | None = None
        self._is_watched = bool(self._norm_tapes) and self._must_record and not is_compiled
        watched_tapes = {norm_tape.module: norm_tape for norm_tape in self._norm_tapes if self._is_watched}

        def mark_read(norm: NormBase) -> None:
            watched_tapes[norm].is_read = True  # stays set, because later steps may not be watched

        self._mark_read = mark_read
        self._accesses, self._was_accessed = StatisticsAccesses(watched_tapes, on_read=mark_read), False
        self._handles = [
            handle
            for norm_tape in (self._norm_tapes if self._must_record else [])
            for handle in (
                norm_tape.module.register_forward_pre_hook(self._make_pre_hook(norm_tape)),
                norm_tape.module.register_forward_hook(self._make_post_hook(norm_tape), always_call=True),
            )
        ]

    @property
    def is_sequential(self) -> bool:
        """Return whether forwards run one after another over all ranks, in the order of one process."""
        return self._relay is not None

    def begin_step(self, *, num_micro: int = 0) -> None:
        """Start a step; in a rerun, first restore the statistics and the counters (`forward_counters`) of modules.

        `num_micro` is the number of microbatches of all ranks together; if it is 0, no forward waits for another.
        """
        if self._numbers is not None:
            self._numbers.begin(num_micro=0 if self._over_batch else num_micro, is_rerun=self._has_run)
        for norm_tape in self._norm_tapes:
            if self._has_run:
                norm_tape.write_statistics(norm_tape.initial_statistics, 0)
            elif norm_tape.module.running_mean is not None:
                norm_tape.initial_statistics, norm_tape.initial_count = (
                    copy_statistics(norm_tape.module),
                    copy_batch_count(norm_tape.module),
                )
            norm_tape.begins_training = norm_tape.module.training
            norm_tape.uses_eval_mode = norm_tape.is_recomputed = norm_tape.momentum_changed = False
            norm_tape.calls.clear()
            norm_tape.count_increments.clear()
            norm_tape.record_version()
        self._has_run = False
        self._accesses.is_armed = num_micro > 0
        self._is_relayed = self._relay is not None and num_micro > 0
        if self._relay is not None:
            self._relay.begin(num_micro=num_micro)

    def set_microbatch(self, microbatch: int, *, has_samples: bool = True) -> None:
        """Set the microbatch of the next forward or backward; without samples, do not record its statistics."""
        is_new_microbatch = not self._has_run or (has_samples and microbatch != self._microbatch)
        if self._is_relayed and has_samples:
            assert self._relay is not None
            self._relay.receive(microbatch)
            for norm_tape in self._norm_tapes:
                norm_tape.record_momentum()
        elif self._must_record and is_new_microbatch and has_samples:
            for norm_tape in self._norm_tapes:
                self._detect_writes(norm_tape, by_value=not self._is_checked)
                self._start_microbatch(norm_tape, microbatch)
        if self._numbers is not None:
            self._numbers.set_microbatch(microbatch if has_samples else None, sets_numbers=not self._is_relayed)
        self._has_run = True
        self._microbatch, self._has_samples = microbatch if has_samples else self._microbatch, has_samples

    def recording_context(self) -> AbstractContextManager[object]:
        """Return a context for a forward and its loss, or a backward, that detects reads of norm statistics.

        The context detects reads in the first step, and in each step after a step in which user code accessed the
        statistics. If user code accesses the statistics from a new line, the step is rerun with detection of reads.
        """
        self._reads = None
        if not self._is_watched or self._is_relayed or (self._is_checked and not self._was_accessed):
            return nullcontext()
        tapes_by_norm = {norm_tape.module: norm_tape for norm_tape in self._norm_tapes if norm_tape.has_statistics}
        self._reads = StatisticsReads(
            tapes_by_norm, is_inside=lambda norm: tapes_by_norm[norm].is_inside, on_read=self._mark_read
        )
        return self._reads

    def end_forward(self, microbatch: int) -> None:
        """Send the statistics to the rank of the next microbatch, if forwards run sequentially over all ranks."""
        if self._is_relayed and self._has_samples:
            assert self._relay is not None
            for norm_tape in self._norm_tapes:
                norm_tape.compare_momentum()
            self._relay.send(microbatch)

    def fold(self, *, num_micro: int) -> bool:
        """Set every norm's statistics to those of one process after `num_micro` microbatches.

        Return False, on all ranks, if this is not possible and the step must be rerun.

        Raises:
            DesyncError: a norm is in training mode on some ranks and in eval mode on others.
            JobError: a norm depends on the order of microbatches, and ranks can't run their forwards in that order.
        """
        self._accesses.is_armed = False
        if self._numbers is not None:
            for norm_tape in self._norm_tapes:
                self._detect_writes(norm_tape, by_value=not self._is_checked)
                norm_tape.compare_momentum()
            calls, changed_as_expected = self._gather_calls(num_micro)
            if not (changed_as_expected or self._numbers.agree_on_changes(is_relayed=self._is_relayed)):
                return False
            if self._must_rerun_watched():
                return False
            if not self._set_final_statistics(calls, num_micro=num_micro):
                return False
            self._add_note(self._numbers.finish_step(is_relayed=self._is_relayed))
        self._has_run = False
        return True

    def end_skipped_step(self) -> None:
        """End a step whose update was skipped: restore the statistics from before it."""
        for norm_tape in self._norm_tapes:
            norm_tape.write_statistics(norm_tape.initial_statistics, 0)
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

    def _set_final_statistics(self, calls: Sequence[TapedCalls], *, num_micro: int) -> bool:
        """Set all statistics to those after the step; return False if it must be rerun with sequential forwards."""
        assert self._numbers is not None
        for taped_calls in calls:
            if taped_calls.is_split:
                self._refuse_mixed_modes(taped_calls.norm_tape)
        dependences = [
            taped_calls.dependence
            for taped_calls in calls
            if taped_calls.dependence.is_order_dependent and (num_micro > 1 or taped_calls.dependence.is_bypassed)
        ]
        if not self._can_wait or any(dependence.is_recomputed for dependence in dependences):
            for dependence in dependences:
                dependence.refuse(over_batch=self._over_batch)
                self._add_note(dependence.stale_note)
        elif dependences and not self._is_relayed:
            modules = [norm_tape.module for norm_tape in self._norm_tapes]
            self._relay = StatisticsRelay(modules, numbers=self._numbers, world=self._world)
            self._add_note(f"{dependences[0].reason}: ranks run their forwards one after another, as one process does")
            return False
        self._write_final_statistics(calls, stays_sequential=bool(dependences))
        return True

    def _start_microbatch(self, norm_tape: NormTape, microbatch: int) -> None:
        """Load the statistics that a microbatch starts or continues with."""
        if norm_tape.calls:
            norm_tape.write_statistics(
                norm_tape.statistics_during(microbatch)[-1], norm_tape.count_increments.get(microbatch, 0)
            )
        if not norm_tape.calls.get(microbatch):
            norm_tape.compare_momentum()
            norm_tape.record_momentum()

    def _detect_writes(self, norm_tape: NormTape, *, by_value: bool = False) -> None:
        """Detect writes by code around the norm.

        If the code restored the statistics from before some calls, drop these calls. Any other write can be reproduced
        only with sequential forwards. `by_value`: compare values, since `F.batch_norm` does not change versions. This
        is slow, so it is done only in the first step.
        """
        if self._is_relayed or not norm_tape.has_statistics or not (by_value or norm_tape.is_modified()):
            return
        current, recorded = copy_statistics(norm_tape.module), norm_tape.statistics_during(self._microbatch)
        num_kept_calls = next(
            (index for index in reversed(range(len(recorded))) if equal_tensors(recorded[index], current)), None
        )
        if num_kept_calls is None:
            self._mark_bypassed(norm_tape)
        elif num_kept_calls < len(recorded) - 1:
            del norm_tape.calls[self._microbatch][num_kept_calls:]
            if norm_tape.initial_count is not None and norm_tape.module.num_batches_tracked is not None:
                norm_tape.count_increments[self._microbatch] = int(norm_tape.module.num_batches_tracked) - int(
                    norm_tape.initial_count
                )
        norm_tape.record_version()

    def _mark_bypassed(self, norm_tape: NormTape) -> None:
        """Record that the statistics were written by another rule than the running average."""
        if not self._can_wait:
            OrderDependence(name=norm_tape.name, is_bypassed=True).refuse(over_batch=self._over_batch)
        norm_tape.is_bypassed = True  # stays set, because only the first step compares values

    def _gather_calls(self, num_micro: int) -> tuple[list[TapedCalls], bool]:
        """Return each norm's calls on all ranks, and whether the modules' counters changed as expected."""
        assert self._numbers is not None
        table = torch.zeros(len(self._norm_tapes) + 1, 2 * num_micro + _NUM_FLAGS, dtype=torch.int64)
        table[-1, 0] = int(not self._numbers.changed_as_expected(is_relayed=self._is_relayed))
        was_watched = not self._is_checked or self._was_accessed
        table[-1, 1] = int(self._accesses.has_new_access and not (was_watched or self._is_relayed))
        self._was_accessed, self._is_checked = self._accesses.has_access, True
        self._accesses.has_new_access = self._accesses.has_access = False
        for norm_tape, row in zip(self._norm_tapes, table, strict=False):
            flags = row[2 * num_micro :]
            flags[_TRAIN_MODE if norm_tape.begins_training else _EVAL_MODE] = 1
            flags[_USES_EVAL_MODE], flags[_IS_RECOMPUTED] = int(norm_tape.uses_eval_mode), int(norm_tape.is_recomputed)
            flags[_MOMENTUM_CHANGES], flags[_MOMENTUM_KEEPS_CHANGING] = (
                int(norm_tape.momentum_changed),
                int(norm_tape.num_momentum_changes > 1),
            )
            flags[_IS_BYPASSED], flags[_IS_READ] = int(norm_tape.is_bypassed), int(norm_tape.is_read)
            for index, calls in norm_tape.calls.items():
                row[index], row[num_micro + index] = len(calls), norm_tape.count_increments.get(index, 0)
        if self._world.world_size > 1:
            table = self._world.all_reduce(table.to(self._world.device), op="max").cpu()
        has_unexpected_changes, self._has_new_access, *_ = map(bool, table[-1].tolist())
        taped_calls = []
        for norm_tape, row in zip(self._norm_tapes, table.tolist(), strict=False):
            flags = row[2 * num_micro :]
            has_run = sum(row[:num_micro]) > 0
            dependence = OrderDependence(
                name=norm_tape.name,
                uses_eval_mode=has_run and flags[_USES_EVAL_MODE] > 0,
                momentum_changes=has_run and flags[_MOMENTUM_CHANGES] > 0,
                momentum_keeps_changing=has_run and flags[_MOMENTUM_KEEPS_CHANGING] > 0,
                is_read=has_run and flags[_IS_READ] > 0,
                is_bypassed=flags[_IS_BYPASSED] > 0,
                is_recomputed=flags[_IS_RECOMPUTED] > 0,
            )
            is_split = bool(flags[_EVAL_MODE] and flags[_TRAIN_MODE])
            taped_calls.append(
                TapedCalls(norm_tape, row[:num_micro], row[num_micro : 2 * num_micro], dependence, is_split)
            )
        return taped_calls, not has_unexpected_changes

    def _must_rerun_watched(self) -> bool:
        """Detect reads from now on if a new line accessed the statistics; return True if this step must be rerun."""
        self._was_accessed = self._was_accessed or self._has_new_access
        return self._has_new_access and self._can_wait

    def _write_final_statistics(self, calls: Sequence[TapedCalls], *, stays_sequential: bool) -> None:
        if self._is_relayed and self._relay is not None:
            self._relay.broadcast_last()
            self._relay = self._relay if stays_sequential else None
            return
        changed = [taped_calls for taped_calls in calls if any(taped_calls.num_calls + taped_calls.count_increments)]
        for taped_calls, tape in zip(changed, self._gather_tapes(changed), strict=True):
            statistics = fold_statistics(taped_calls, tape)
            taped_calls.norm_tape.write_statistics(statistics, sum(taped_calls.count_increments))

    def _add_note(self, note: str) -> None:
        if note and note not in self._reported_notes and self._world.world_size > 1:
            self._reported_notes.add(note)
            self.notes.append(note)

    def _refuse_mixed_modes(self, norm_tape: NormTape) -> None:
        modes = self._world.gather_json(norm_tape.begins_training)
        eval_ranks = [str(rank) for rank, is_training in enumerate(modes) if not is_training]
        raise DesyncError(
            f"{norm_tape.name} is in eval mode on rank {', '.join(eval_ranks)} and in training mode on the others.",
            cause="code that calls eval() or train() on some ranks only",
            hint="the same mode on every rank; to freeze its statistics, eval() on all",
        )

    def _gather_tapes(self, changed: Sequence[TapedCalls]) -> list[Tensor]:
        """Return the tapes with all ranks' rows. A row is zero on all ranks but one, so the sum is exact."""
        if not changed:
            return []
        first = changed[0].norm_tape.initial_statistics
        widths = [[num_calls * calls.norm_tape.width for num_calls in calls.num_calls] for calls in changed]
        dtype = torch.promote_types(first.dtype, torch.float32)
        flat = torch.zeros(sum(map(sum, widths)), dtype=dtype, device=first.device)
        tapes = list(flat.split([sum(row_sizes) for row_sizes in widths]))
        for calls, row_sizes, tape in zip(changed, widths, tapes, strict=True):
            for microbatch, rows in enumerate(tape.split(row_sizes)):
                local_calls = calls.norm_tape.calls.get(microbatch, ())
                for row, (after, weight) in zip(rows.view(-1, calls.norm_tape.width), local_calls, strict=False):
                    row[:-1], row[-1] = after, weight
        self._world.all_reduce(flat)
        return tapes

    def _make_pre_hook(self, norm_tape: NormTape) -> Callable[[nn.Module, tuple[object, ...]], None]:
        def hook(module: nn.Module, inputs: tuple[object, ...]) -> None:
            if module is not norm_tape.module:
                return
            norm_tape.is_inside = True
            if not (self._has_run and norm_tape.has_statistics):
                return
            if self._has_samples and not torch.compiler.is_compiling():
                self._detect_writes(norm_tape)
            if not has_torch_forward(norm_tape.module):
                norm_tape.watches.append(KernelWatch(norm_tape.module, () if self._is_checked else inputs))

        return hook

    def _make_post_hook(self, norm_tape: NormTape) -> Callable[[nn.Module, object, object], None]:
        def hook(module: nn.Module, _: object, output: object) -> None:
            if module is norm_tape.module:  # a copy of the model has the hooks of the original
                self._record_call(norm_tape, has_output=output is not None)
                norm_tape.is_inside = False
                if self._reads is not None:
                    self._reads.finish_call(norm_tape.module)

        return hook

    def _record_call(self, norm_tape: NormTape, *, has_output: bool) -> None:
        """Record the calls of the kernels in one call of the norm; `has_output` is False if it raised an error."""
        watch = norm_tape.watches.pop().stop() if norm_tape.watches else None
        has_run = has_output or is_in_backward()  # checkpointing may stop a recomputed forward before its end
        if not (self._has_run and has_run and self._has_samples and norm_tape.has_statistics):
            return
        calls, num_increments, uses_statistics = (
            torch_norm_calls(norm_tape.module)
            if watch is None
            else (watch.calls, watch.num_count_increments, watch.has_used_statistics)
        )
        norm_tape.uses_eval_mode = norm_tape.uses_eval_mode or uses_statistics
        if watch is not None and watch.is_unknown:
            self._mark_bypassed(norm_tape)
        if calls:
            norm_tape.is_recomputed = norm_tape.is_recomputed or is_in_backward()
            norm_tape.calls.setdefault(self._microbatch, []).extend(calls)
            norm_tape.count_increments[self._microbatch] = (
                norm_tape.count_increments.get(self._microbatch, 0) + num_increments
            )
            if not torch.compiler.is_compiling():
                norm_tape.record_version()


def build_state_recorders(
    model: nn.Module,
    *,
    world: World,
    enabled: bool,
    exact: bool,
    in_order: bool,
    can_wait: bool,
    over_batch: bool,
    is_compiled: bool,
) -> list[StatisticsRecorder | NumberRecorder]:
    """Return the recorders for this model's steps; an empty list if nothing can differ from one process."""
    if enabled and any(norms_with_statistics(model)):
        recorder = StatisticsRecorder(
            model=model,
            world=world,
            exact=exact,
            in_order=in_order,
            can_wait=can_wait,
            over_batch=over_batch,
            is_compiled=is_compiled,
        )
        return [recorder]
    return [NumberRecorder(model, world=world, over_batch=over_batch)] if world.world_size > 1 or exact else []


def _make_forward_numbers(model: nn.Module, *, world: World, norm_tapes: Sequence[NormTape]) -> ForwardNumbers:
    momentum_names = [f"{norm_tape.name}.momentum" for norm_tape in norm_tapes]
    return ForwardNumbers(model, world=world, always=bool(norm_tapes), reported_elsewhere=momentum_names)
