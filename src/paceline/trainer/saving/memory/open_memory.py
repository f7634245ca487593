"""The checkpoints in memory of a run: on one machine, on several nodes, or none."""

from pathlib import Path

from paceline.checkpoint.files.peers.peer_checkpoint import parse_plan
from paceline.checkpoint.files.peers.peer_files import PeerFiles
from paceline.comm.process_group import World
from paceline.config.task import Task
from paceline.run_folder.run_folder import RunFolder
from paceline.trainer.saving.memory.memory_folder import MemoryFolder
from paceline.trainer.saving.memory.peer_memory import PeerMemory
from paceline.trainer.saving.memory.rank_memory import RankMemory
from paceline.trainer.setup.build_training_setup import TrainingSetup


def open_memory(setup: TrainingSetup, task: Task) -> RankMemory | None:
    """Return the memory for the checkpoints of a run, or None if it has none.

    A run has none if its command made no folder for it, if the settings use none, or if the update is asynchronous. An
    asynchronous run completes its steps in flight before each save, so additional saves would change the training. On
    several nodes, it is not used by saves in the background, because rank 0 does not have the files of the other nodes.
    """
    checkpoint, is_on_nodes = setup.settings.checkpoint, task.peer_plan is not None
    keeps_checkpoints = checkpoint.memory_every != 0
    is_used = keeps_checkpoints or (checkpoint.background and not is_on_nodes)
    if not is_used or not setup.plan.update_rule.is_synchronous:
        return None
    has_folder = bool(task.memory_folder)
    if not (all(setup.world.gather_json(has_folder)) if is_on_nodes else has_folder):  # a node may have no memory
        return None
    path = Path(task.memory_folder)
    if task.peer_plan is not None:
        return PeerMemory(
            path,
            world=setup.world,
            plan=parse_plan(task.peer_plan),
            files=open_peer_files(setup.world, task),
            num_copies=checkpoint.peer_copies,
            attempt=task.attempt,
        )
    return MemoryFolder(
        path, world=setup.world, keeps_checkpoints=keeps_checkpoints, attempt=task.attempt, run=Path(task.run)
    )


def open_peer_files(world: World, task: Task) -> PeerFiles:
    """Return the files in the memory of the nodes of this attempt."""
    folder = RunFolder(Path(task.run)).attempt_folder(task.attempt)
    return PeerFiles(folder, timeout_seconds=world.timeout_seconds)
