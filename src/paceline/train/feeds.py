"""A job's data as a run reads it."""

from typing import Any

from paceline.feed.feed import Feed, make_feed
from paceline.feed.types import Cut
from paceline.job import Job
from paceline.order.cursor import Cursor
from paceline.plan.settle import Plan
from paceline.spec.settings import Settings
from paceline.world import World


def feed_for(job: Job, settings: Settings, *, cut: Cut, cursor: Cursor | None = None, **how: Any) -> Feed:
    """From the beginning, or where `cursor` stands; `how` as `make_feed` has it."""
    return make_feed(
        data=job.train_data,
        collate=job.collate,
        order=job.order,
        seed=settings.seed,
        cut=cut,
        cursor=cursor or Cursor(),
        **how,
    )


def cut_for(plan: Plan, settings: Settings, data: World, *, reads: bool = True) -> Cut:
    """What a replica gets of each global batch; `data` are the replicas."""
    return Cut(
        global_batch_size=plan.global_batch_size,
        micro_batch_size=plan.micro_batch_size,
        replica=data.rank,
        replicas=data.world_size,
        drop_last=settings.data.drop_last,
        reads=reads,
    )
