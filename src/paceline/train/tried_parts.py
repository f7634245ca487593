"""What `cp` and `ep` ask of a model with its numbers, before there is a run: does it give the same in parts?"""

import torch

from paceline.plan.settle import Cluster, Facts, settle
from paceline.spec.layout import parse_layout
from paceline.spec.update import parse_update
from paceline.step.loss import LossContract
from paceline.streams import preserved
from paceline.train.built import build_model
from paceline.train.context import is_small, try_context, try_experts
from paceline.train.example import FEW, Example
from paceline.train.ready import Ready


def refuse_parts(ready: Ready, *, cp: int, ep: int, elements: int) -> None:
    """Ask what a run's start would, of as few samples, in this process; of a large model that asks nobody.

    Raises:
        LayoutError: it gives something else.
    """
    if not is_small(elements):
        return
    job, settings = ready.job, ready.settings
    plan = settle(
        layout=parse_layout("single"),
        update=parse_update("sync"),
        cluster=Cluster(ranks=1),
        facts=Facts(global_batch_size=FEW, micro_batch_size=FEW),
    )
    with preserved():
        model = build_model(job, seed=settings.seed)
        contract = LossContract(job=job, model=model)
        example = Example(
            job=job, settings=settings, plan=plan, model=model, contract=contract, device=torch.device("cpu")
        )
        example.learn()
        if cp > 1:
            try_context(job, model=model, contract=contract, ranks=cp, example=example)
        if ep > 1:
            try_experts(model=model, contract=contract, example=example)
