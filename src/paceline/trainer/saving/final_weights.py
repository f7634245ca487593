"""The final weights of a run: `consolidated/`, and a record with their digest."""

from pathlib import Path
from typing import Any

from paceline.checkpoint.consolidate import consolidate_weights
from paceline.checkpoint.files.checkpoint_folder import BEST, parse_step, resolve_mark
from paceline.checkpoint.files.hf_folder import WEIGHTS_RECORD, add_digest, digest_files
from paceline.checkpoint.state_dict_view import view_state_dict
from paceline.checkpoint.tensor_bytes import weights_digest
from paceline.filesystem.atomic_files import write_json
from paceline.filesystem.disk_full import convert_to_save_error
from paceline.job import Job
from paceline.launch.launch_environment import kernel_fingerprint
from paceline.planner.layout.host_resources import cpu_name
from paceline.profiling.environment import torch_build
from paceline.run_folder.run_folder import RunFolder
from paceline.trainer.saving.local_sgd_state import is_writer
from paceline.trainer.setup.build_training_setup import TrainingSetup


def write_final_weights(setup: TrainingSetup, run: Path, *, step: int) -> str:
    """Write the weight digest and `consolidated/`, the model as evaluated. Return a line that names both.

    The digest covers the trained weights, not their average. Torch's build and kernels affect the digest, so their
    names are written next to it. Every rank must call this, and rank 0 writes. If rank 0 holds the whole model, the
    other ranks do nothing.
    """
    with setup.step.synchronized_weights():
        return _write_final_weights(setup, run, step=step)


def _write_final_weights(setup: TrainingSetup, run: Path, *, step: int) -> str:
    if not is_writer(setup) or (setup.weights.is_unsharded and not setup.world.is_main):
        return ""
    state_view = view_state_dict(setup.model, weights=setup.weights, world=setup.site)
    digest = weights_digest(state_view.full_tensors(sorted(state_view.entries)))
    record: dict[str, Any] = {"digest": digest, "of": "the weights in training", "step": step}
    record |= {"torch_build": torch_build(), "cpu": cpu_name(), "kernels": kernel_fingerprint()}
    if setup.world.is_main:
        with convert_to_save_error(WEIGHTS_RECORD, run):  # remove the old digest until the folder is complete
            (run / WEIGHTS_RECORD).unlink(missing_ok=True)
    with setup.as_evaluated():
        folder = consolidate_weights(
            state_view, run / "consolidated", config=getattr(setup.model, "config", None), world=setup.site
        )
        if setup.update.ema is not None:
            record["average"] = weights_digest(state_view.full_tensors(sorted(state_view.entries)))
    if setup.world.is_main:
        with convert_to_save_error(WEIGHTS_RECORD, run):
            write_json(run / WEIGHTS_RECORD, add_digest({**record, "files": digest_files(folder)}))
    if setup.update.ema is None:
        return f"weights {digest[:16]} in {folder}"
    return f"average {record['average'][:16]} in {folder}, as evaluated (ema); the weights in training: {digest[:16]}"


def best_weights_notes(job: Job, run: RunFolder, *, step: int) -> list[str]:
    """Return a note on how to get the best step's weights, if the best step is not the last one, `step`."""
    best_checkpoint = resolve_mark(run.checkpoints, BEST)
    uses_best = job.best is not None or job.early_stopping is not None
    if not uses_best or best_checkpoint is None or parse_step(best_checkpoint) == step:
        return []
    return [
        f"consolidated/ has the weights of step {step}, the last one; the best weights are from step "
        f"{parse_step(best_checkpoint)}: paceline ckpt consolidate {run.path} --best --to best"
    ]
