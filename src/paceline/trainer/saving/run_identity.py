"""The identity of a run: the properties that it must still have when it is resumed."""

from typing import Any

from paceline.checkpoint.lr_schedule_state import describe_schedules
from paceline.checkpoint.optimizer_state import group_names
from paceline.checkpoint.state_dict_view import view_state_dict
from paceline.launch.launch_environment import kernel_fingerprint
from paceline.step.update_rules import step_rule
from paceline.trainer.saving.checkpointer import build_train_state
from paceline.trainer.setup.build_training_setup import TrainingSetup


def run_identity(setup: TrainingSetup, *, num_samples: int | None, data: str, job: str = "") -> dict[str, Any]:
    """Return the properties that a run must still have when it is resumed, as JSON. Every rank must call this.

    `num_samples` is None for a stream. `data` is the fingerprint of the data. `job` is the name of the job's file, or
    empty for a Python object, which has none.
    """
    train_state = build_train_state(setup)
    groups = group_names(setup.update.optimizers, train_state.optimizer_shards)
    optimizers = [
        {
            "kind": type(o).__name__,
            "groups": [len(names) for names in parameter_names],
            "options": options,
            "names": parameter_names,
        }
        for o, parameter_names, options in zip(setup.update.optimizers, groups, setup.initial_options, strict=True)
    ]
    return {
        "model": view_state_dict(setup.model, weights=setup.weights, world=setup.site).structure,
        "job": job,
        "data": {"num_samples": num_samples, "fingerprint": data},
        "seed": setup.settings.seed,
        "global_batch_size": setup.plan.global_batch_size,
        "micro_batch_size": setup.plan.micro_batch_size,
        "optimizer": optimizers,
        "schedule": describe_schedules(setup.update.lr_schedulers, setup.update.optimizers, setup.initial_options),
        "max_grad_norm": setup.settings.train.max_grad_norm,
        "ema": setup.job.ema,
        "exact": setup.settings.train.exact,
        "tensor_shards": setup.settings.train.tensor_shards,
        "sequence_shards": setup.settings.train.sequence_shards,
        "kernels": kernel_fingerprint(),
        "precision": setup.settings.train.precision,
        "buffers": setup.settings.train.buffers,
        "drop_last": setup.settings.data.drop_last,
        "sample_seeds": setup.settings.data.sample_seeds,
        "update": step_rule(setup.plan.update_rule).identity(setup.plan, setup.parallelized_model.pipeline_model),
        "compress": setup.plan.compress,
    }
