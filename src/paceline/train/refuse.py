"""What can't be had together: a job, its settings, and the plan."""

from paceline.errors import JobError, PacelineError, UsageError, raise_all
from paceline.job import Job
from paceline.place.exact import MOST_MICROBATCHES
from paceline.place.threads import refuse_under_threads
from paceline.plan.settle import Plan
from paceline.spec.settings import Settings
from paceline.train.wishes import best_rule


def refuse_asked(job: Job, settings: Settings, plan: Plan) -> None:
    """Refuse what this job, these settings and this plan can't have together, all at once.

    Raises:
        JobError, UsageError, Problems
    """
    problems: list[PacelineError] = []
    train = settings.train
    if train.exact:
        problems += _check_exact(plan, train.precision)
    if plan.replicas > plan.processes:
        problems += refuse_under_threads(buffers=train.buffers, compiled=train.compile)
    if train.precision == "fp16" and job.loss is not None and job.count is None:
        problems.append(
            JobError(
                "fp16 needs the counts before the first forward, so that the scaled loss stays in range.",
                hint="count=lambda batch: number of targets, or --train.precision bf16",
            )
        )
    if job.loss_over == "batch":
        problems += _check_whole(job, settings, plan)
    best_rule(job)
    raise_all(problems)


def _check_whole(job: Job, settings: Settings, plan: Plan) -> list[PacelineError]:
    found: list[PacelineError] = []
    if job.loss is None:
        found.append(JobError('loss_over="batch" needs loss=: the model\'s own sees its microbatch only.'))
    if plan.num_micro > plan.replicas:
        found.append(
            UsageError(
                f'loss_over="batch" refuses accumulation: {plan.num_micro} microbatches for {plan.replicas} replicas.',
                cause="the loss needs the outputs of the whole batch at once",
                hint="leave --train.micro_batch_size out, or more --ranks",
            )
        )
    for is_on, name in ((settings.train.exact, "--train.exact"), (settings.train.buffers == "sync_bn", "sync_bn")):
        if is_on:
            found.append(UsageError(f'loss_over="batch" with {name} is not proved.', hint="leave one of them out"))
    return found


def _check_exact(plan: Plan, precision: str) -> list[PacelineError]:
    found: list[PacelineError] = []
    if plan.device != "cpu":
        found.append(UsageError("exact mode is proved on CPUs only so far.", hint="--device cpu"))
    if precision == "fp16":
        found.append(UsageError("exact mode with fp16 is not proved: its loss scale may differ.", hint="bf16 or fp32"))
    if plan.num_micro > MOST_MICROBATCHES:
        found.append(
            UsageError(
                f"exact mode adds at most {MOST_MICROBATCHES} microbatches, this run has {plan.num_micro}.",
                hint="a larger --train.micro_batch_size",
            )
        )
    return found
