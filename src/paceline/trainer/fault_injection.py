"""Injection of faults before a step, also of those that change its numbers: a wrong loss, or a wrong weight."""

import math
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import psutil

from paceline.config.task import Task
from paceline.errors import UsageError
from paceline.faults import TRAINING_KINDS, Fault, Faults
from paceline.launch.agent.launcher_death import launcher_pid
from paceline.launch.inherited_environment import AGENT_PID, own_environ
from paceline.launch.launcher_variables import USES_BACKEND
from paceline.parallel.module_access.tensor_access import local_elements
from paceline.run_folder.run_folder import RunFolder
from paceline.trainer.saving.memory.rank_memory import RankMemory
from paceline.trainer.setup.build_training_setup import TrainingSetup

_SPIKE_FACTOR = 1e4
_LOSS_FACTORS = {"nan": math.nan, "spike": _SPIKE_FACTOR}


def open_faults(faults: Sequence[Fault], task: Task, *, rank: int) -> Faults:
    """Return the faults of a rank in this attempt of a run."""
    run = RunFolder(Path(task.run))
    return Faults(
        faults,
        rank=rank,
        attempt=task.attempt,
        attempt_folder=run.attempt_folder(task.attempt),
        command_pid=command_pid(faults, run.path),
    )


def command_pid(faults: Sequence[Fault], run: Path) -> int:
    """Return the process that `kill_node` kills besides the rank: the command that started the ranks on this machine.

    It is 0 if no fault needs it.

    Raises:
        UsageError: a fault needs it, and it is not known.
    """
    if not any(fault.kind == "kill_node" for fault in faults):
        return 0
    agent = own_environ(os.environ).get(AGENT_PID, "")
    if agent:
        return int(agent)
    launcher = launcher_pid(os.environ)
    if launcher is None:
        raise UsageError(
            "kill_node does not know which process has started the ranks.",
            cause="neither paceline, nor torchrun, nor an MPI program has started them",
            hint='--faults "kill rank=1 step=50"',
        )
    return psutil.Process(launcher).ppid() if USES_BACKEND in os.environ else launcher


def inject_step_fault(faults: Faults, *, step: int, setup: TrainingSetup, memory: RankMemory | None) -> None:
    """Inject the fault that is due on this rank before a step, if there is one. Every rank must call this.

    The checkpoint in memory of the step before is committed first, so that the same fault always has the same outcome.
    """
    if memory is not None and faults.is_due_on_any_rank("step", step=step):
        memory.wait_until_committed()
    fault = faults.fire("step", step=step)
    if fault is not None and fault.kind in TRAINING_KINDS:
        _inject_training_fault(fault, faults, setup)


def _inject_training_fault(fault: Fault, faults: Faults, setup: TrainingSetup) -> None:
    """Inject a fault that changes the numbers of the step.

    `nan` and `spike` multiply the loss of this rank's next microbatch. If this rank computes no loss, as in most stages
    of a pipeline, nothing happens, and the run reports the fault at its end as one that did not happen. `corrupt` adds
    1 to one element of this rank's weights.
    """
    if fault.kind in _LOSS_FACTORS:
        contract = setup.step.replica.contract
        contract.multiply_next_loss(_LOSS_FACTORS[fault.kind], on_use=partial(faults.mark_injected, fault))
    elif fault.kind == "corrupt" and _corrupt_weight(setup):
        faults.mark_injected(fault)


def _corrupt_weight(setup: TrainingSetup) -> bool:
    """Add 1 to the first element of the first weight of which this rank holds a part; return False if it holds none."""
    for member in setup.named_parameters:
        local = local_elements(member.parameter.detach())
        if local.numel() and local.dtype.is_floating_point:
            local.view(-1)[:1] += 1.0
            return True
    return False
