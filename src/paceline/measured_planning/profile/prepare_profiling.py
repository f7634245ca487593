"""Prepare a job for profiling, and the space of layouts that a plan searches."""

from dataclasses import replace

from paceline.config.settings import Settings
from paceline.errors import UsageError
from paceline.measured_planning.profile.largest_sample import use_largest_sample
from paceline.measured_planning.profile.truncated_model import build_once
from paceline.parallel.batchnorm.norm_tape import norms_with_statistics
from paceline.parallel.initialization.pretrained import PretrainedModel
from paceline.planner.search.search_space import SearchSpace
from paceline.profiling.model_tracing.fake_execution import FakeExecutionMode
from paceline.trainer.setup.prepare import PreparedJob

_BATCHNORM_NOTE = (
    "BatchNorm: the samples of a microbatch interact, so a different microbatch size changes the training; "
    "--train.micro_batch_size fixes the size"
)


def prepare_for_profiling(prepared_job: PreparedJob) -> tuple[PreparedJob, tuple[str, ...]]:
    """Return the job prepared for profiling and replays, and notes to print."""
    job, note = use_largest_sample(prepared_job.job, prepared_job.settings)
    prepared = replace(prepared_job, job=build_once(job, seed=prepared_job.settings.seed))
    notes = [note] if note else []
    if prepared_job.settings.train.micro_batch_size is None and not isinstance(prepared.job.model, PretrainedModel):
        with FakeExecutionMode() as fake_mode:
            fake_mode.comparisons_are_true = False
            notes += [_BATCHNORM_NOTE] if norms_with_statistics(prepared.job.model()) else []
    return prepared, tuple(notes)


def make_search_space(settings: Settings, *, command: str) -> SearchSpace:
    """Return the search space of layouts, with the requested microbatch size or, without one, with any size.

    Raises:
        UsageError: a setting excludes the choice that `command` makes.
    """
    if settings.train.gradient_accumulation_steps is not None:
        raise UsageError(
            f"{command} with train.gradient_accumulation_steps: each layout would have different microbatches.",
            cause=f"{command.split()[-1]} also chooses how a batch is split",
            hint="leave out train.gradient_accumulation_steps, or set --train.micro_batch_size instead",
        )
    return SearchSpace(micro_batch_size=settings.train.micro_batch_size)
