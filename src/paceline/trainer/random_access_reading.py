"""Read any part of any batch. A parameter server's worker reads shares; a server reads a batch to find bad inputs."""

from paceline.config.settings import Settings
from paceline.data.leased_loader import RandomAccessLoader
from paceline.data.reader_process import read_in_process
from paceline.data.types import StepInput
from paceline.job import Job
from paceline.trainer.setup.build_training_setup import TrainingSetup


def random_access_loader(job: Job, settings: Settings, *, global_batch_size: int) -> RandomAccessLoader:
    """Return a loader that reads any share of any batch of this job."""
    return RandomAccessLoader(
        data=job.train_data,
        collate=job.collate,
        order=job.order,
        seed=settings.seed,
        sample_seeds=settings.data.sample_seeds,
        global_batch_size=global_batch_size,
        drop_last=settings.data.drop_last,
    )


def read_full_batch(step_batch: StepInput, setup: TrainingSetup) -> StepInput:
    """Return the whole global batch of this step, with the samples that other ranks read."""
    plan, settings = setup.plan, setup.settings

    def read() -> StepInput:
        loader = random_access_loader(setup.job, settings, global_batch_size=plan.global_batch_size)
        return loader.read_share(step_batch.batch.cursor, micro_batch_size=plan.micro_batch_size)

    return read_in_process(setup.data.train, read, seed=settings.seed)
