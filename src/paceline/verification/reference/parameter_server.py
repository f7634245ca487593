"""A replay of a parameter server's run in one process: the same shares, weight versions and order of updates.

It is the reference of `--update ps` with a staleness above 0, written naively: it keeps the full model after every
update. Of the run it uses only the record of the updates, and which server holds which parameter.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]
from typing_extensions import override

from paceline.comm.process_group import LaunchInfo, WorkerEndpoint, World
from paceline.console.formatting import plural
from paceline.step.parameter_server.parameter_server_step import ServerStep
from paceline.step.parameter_server.push_messages import AppliedUpdate
from paceline.step.parameter_server.transport import connect_store
from paceline.trainer.parameter_server_worker import compute_shares
from paceline.trainer.setup.build_training_setup import TrainingSetup
from paceline.trainer.setup.prepare import PreparedJob
from paceline.verification.compare_evaluation import evaluate_layout, judge_evaluation
from paceline.verification.compare_in_lockstep import ReportProgress
from paceline.verification.compare_independent_runs import (
    WeightDrift,
    collect_tensors,
    gather_layout_weights,
    gather_state_dict,
    judge_drift,
    read_first_batches,
)
from paceline.verification.noise_floor import can_perturb, perturb_reference
from paceline.verification.precision import build_in_precision
from paceline.verification.reference.float64_mode import keep_float64
from paceline.verification.reference.loss_terms import nonzero_counts
from paceline.verification.reference.reference import Reference, RunPosition
from paceline.verification.reference.step_coverage import CoverageRecorder
from paceline.verification.rung_result import RungResult

_INSTRUCTION_KEY = "paceline-verify/instruction/{}"
_END, _FLOAT64, _JOB_PRECISION = "end", "float64", "job"
_POLL_SECONDS = 0.05
_START = RunPosition(steps_done=0, epoch=0, batch_start=0)


class WorkerInstructions:
    """Instructions from the first server to the workers: the precision of each rung, then the end."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._number = 0

    def begin_rung(self, dtype: torch.dtype | None) -> World:
        """Announce the next rung to the workers, and return the servers' world for it, which the workers then join."""
        self._send(_FLOAT64 if dtype is torch.float64 else _JOB_PRECISION)
        endpoint = self._world.worker_endpoint
        assert endpoint is not None
        return replace(self._world, worker_endpoint=replace(endpoint, session=str(self._number)))

    def send_end(self) -> None:
        """Tell the workers that no rung follows."""
        self._send(_END)

    def _send(self, instruction: str) -> None:
        self._number += 1
        if self._world.worker_endpoint is not None and self._world.is_main:
            store = connect_store(self._world.worker_endpoint.launch_info, timeout_seconds=self._world.timeout_seconds)
            store.set(_INSTRUCTION_KEY.format(self._number), instruction)


def run_gradient_worker(prepared_job: PreparedJob, launch_info: LaunchInfo) -> int:
    """Run one worker in `verify`: in each rung, build the servers' model, and compute the worker's shares."""
    store = connect_store(launch_info, timeout_seconds=prepared_job.settings.train.timeout_seconds)
    number = 0
    while True:
        number, instruction = wait_for_instruction(store, last_number=number)
        if instruction == _END:
            return 0
        dtype = torch.float64 if instruction == _FLOAT64 else None
        with keep_float64(active=dtype is not None):
            setup = build_in_precision(prepared_job, World.alone(), dtype)
            compute_shares(prepared_job, setup, WorkerEndpoint(launch_info=launch_info, session=str(number)))
            setup.close()


def wait_for_instruction(store: Store, *, last_number: int) -> tuple[int, str]:
    """Wait for the first server's newest instruction, and return its number and text; `_END` if the server has ended.

    A restarted worker skips the instructions of earlier rungs, which have ended.
    """
    number = last_number + 1
    try:
        while not store.check([_INSTRUCTION_KEY.format(number)]):
            time.sleep(_POLL_SECONDS)
        while store.check([_INSTRUCTION_KEY.format(number + 1)]):
            number += 1
        return number, store.get(_INSTRUCTION_KEY.format(number)).decode()
    except RuntimeError:
        return number, _END


class ParameterServerReference(Reference):
    """The one-process replay of recorded updates."""

    compute_counts = staticmethod(nonzero_counts)
    server_of: Mapping[str, int] = MappingProxyType({})
    """The server of each parameter, by name; a parameter without an entry belongs to server 0."""

    @override
    def with_config(self, **changes: Any) -> "ParameterServerReference":
        """Return a new reference at the start of the run, with these changes to its `ReferenceConfig`."""
        reference = super().with_config(**changes)
        other = ParameterServerReference(job=reference.job, config=reference.config, cast=reference.cast)
        other.server_of = self.server_of
        return other

    def replay(
        self, record: Sequence[AppliedUpdate], *, reverse_order: bool, recorder: CoverageRecorder | None = None
    ) -> float:
        """Replay the recorded updates, and return the last share's loss. `reverse_order`: see `compute_gradient`.

        `recorder` records what the updates exercise.
        """
        history, positions = [self._copy_weights()], [_START]  # weights by version, positions by step
        remaining_shares: dict[int, int] = {}  # how many shares of a step are still to come, by step
        loss = float("nan")
        for applied in record:
            share = applied.share
            while len(positions) <= share.step:
                positions.append(
                    self.next_position(
                        positions[-1], sum(len(micro.samples) for micro in self.read_microbatches(positions[-1]))
                    )
                )
            microbatches = self.read_microbatches(positions[share.step])
            indices = list(range(share.number, len(microbatches), share.num_shares))
            if applied.is_applied:
                loss = self._apply_update(
                    applied,
                    [microbatches[i] for i in indices],
                    indices,
                    history,
                    positions[share.step],
                    reverse_order,
                    recorder,
                )
            remaining_shares[share.step] = remaining_shares.get(share.step, share.num_shares) - 1
            for scheduler in self.lr_schedulers if not remaining_shares[share.step] else ():
                scheduler.step()
        return loss

    def _apply_update(
        self,
        applied: AppliedUpdate,
        microbatches: Sequence[Any],
        indices: Sequence[int],
        history: list[dict[str, Tensor]],
        position: RunPosition,
        reverse_order: bool,
        recorder: CoverageRecorder | None,
    ) -> float:
        names, server_of = history[-1], self.server_of
        self._load_weights({name: history[applied.versions[server_of.get(name, 0)]][name] for name in names})
        gradient = self.compute_gradient(
            position, microbatches=microbatches, reverse_order=reverse_order, random_microbatch=indices.__getitem__
        )
        self._load_weights(history[-1])
        if recorder is not None:
            recorder.record_gradient(gradient, position=position, num_microbatches=len(microbatches))
            recorder.record_update(gradient.total)
        schedulers, self.lr_schedulers = self.lr_schedulers, []
        self.update(gradient.total)
        self.lr_schedulers = schedulers
        history.append(self._copy_weights())
        return gradient.loss

    def _copy_weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def _load_weights(self, version: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(version[name])


def _replay_perturbed(
    reference: ParameterServerReference, record: Sequence[AppliedUpdate], seed: int
) -> dict[str, Tensor]:
    perturbed = reference.rebuild()
    assert isinstance(perturbed, ParameterServerReference)
    if can_perturb(perturbed, position=_START, seed=seed):
        perturb_reference(perturbed, seed=seed)
    perturbed.replay(record, reverse_order=True)
    return collect_tensors(perturbed)


def server_of_parameters(setup: TrainingSetup) -> dict[str, int]:
    """Return the server that holds each parameter."""
    specs_by_name = {name: setup.optim_shards.shard_specs(name) for name in setup.optim_shards.names}
    return {name: next((n for n, spec in enumerate(specs) if spec.numel), 0) for name, specs in specs_by_name.items()}


def compare_parameter_server_run(
    setup: TrainingSetup, *, reference: Reference | None, steps: int, report_progress: ReportProgress
) -> RungResult:
    """Run the layout freely, and compare its weights with a one-process replay of its recorded updates."""
    rung_result, step = RungResult(), setup.step
    assert isinstance(step, ServerStep)
    step.record = []
    report_progress(plural(steps, "step"))
    results = [step.run(step_input) for step_input in read_first_batches(setup, steps, {})]
    step.finish_pending()
    layout_evaluation, weights, layout_tensors = (
        evaluate_layout(setup),
        gather_layout_weights(setup),
        gather_state_dict(setup),
    )
    if isinstance(reference, ParameterServerReference):
        reference.server_of = server_of_parameters(setup)
        initial_tensors = {name: tensor.clone() for name, tensor in collect_tensors(reference).items()}
        recorder = CoverageRecorder(reference, replicas=1)  # of each share
        loss = reference.replay(step.record, reverse_order=False, recorder=recorder)
        rung_result.coverage = recorder.as_json()
        replay_perturbed = partial(_replay_perturbed, reference, step.record)
        judge_drift(rung_result, weights, reference, replay_perturbed, initial_tensors, steps, WeightDrift())
        max_staleness = max((number for counts in step.collect_staleness() for number, _ in counts["late"]), default=0)
        rung_result.detail = (
            f"{plural(len(step.record), 'update')}, with a staleness of at most {max_staleness}, replayed in order; "
            f"loss of the last batch {results[-1].loss:.6g}, of the last share {loss:.6g}."
        )
        if layout_evaluation is not None:
            judge_evaluation(rung_result, setup, reference, layout_evaluation, steps, layout_tensors)
    shared_result: RungResult = RungResult(**setup.world.share_json(vars(rung_result)))
    return shared_result
