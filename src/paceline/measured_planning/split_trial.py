"""Check with real values, before a run, that a model split by `cp` or `ep` computes the results of the whole model."""

import torch

from paceline.config.layout import parse_layout
from paceline.config.update_rule import parse_update
from paceline.planner.layout.execution_plan import JobFacts, Resources, make_execution_plan
from paceline.step.loss.loss_return_value import LossContract
from paceline.torch_internals.rng import preserve_rng
from paceline.trainer.checks.example_batch import SMALL_BATCH_SIZE, ExampleBatch
from paceline.trainer.checks.parallel_checks import is_small_enough, try_context_parallel, try_expert_parallel
from paceline.trainer.setup.build_training_setup import build_model
from paceline.trainer.setup.prepare import PreparedJob


def check_split_model(prepared_job: PreparedJob, *, cp: int, ep: int, elements: int) -> None:
    """Run the checks of cp and ep that a run makes at its start, but in this process. They use few samples.

    A model with too many `elements` is not checked.

    Raises:
        LayoutError: the split model computes a different result.
    """
    if not is_small_enough(elements):
        return
    job, settings = prepared_job.job, prepared_job.settings
    plan = make_execution_plan(
        layout=parse_layout("single"),
        update=parse_update("sync"),
        resources=Resources(ranks=1),
        facts=JobFacts(global_batch_size=SMALL_BATCH_SIZE, micro_batch_size=SMALL_BATCH_SIZE),
    )
    with preserve_rng():
        model = build_model(job, seed=settings.seed)
        contract = LossContract(job=job, model=model)
        example = ExampleBatch(
            job=job, settings=settings, plan=plan, model=model, contract=contract, device=torch.device("cpu")
        )
        example.learn_loss()
        if cp > 1:
            try_context_parallel(job, model=model, contract=contract, ranks=cp, example=example)
        if ep > 1:
            try_expert_parallel(model=model, contract=contract, example=example)
