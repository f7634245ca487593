"""Faults planted by somebody who had not read how causes are found, each with what the user must be told."""

import re

import pytest

from tests.conftest import Shop
from tests.parity.planted import Planted
from tests.parity.planted_in_jobs import IN_JOBS
from tests.parity.planted_in_parts import IN_PARTS

FAULTS = [*IN_JOBS, *IN_PARTS]


@pytest.mark.parametrize(
    "planted", [pytest.param(p, id=p.name, marks=[] if p.quick else [pytest.mark.soak]) for p in FAULTS]
)
def test_the_user_is_told_what_is_wrong(shop: Shop, planted: Planted) -> None:
    shop.write("job.py", planted.job())
    ended = shop.run(*planted.command())
    assert not (wrong := misses(planted, ended.code, ended.out, ended.text)), f"{wrong}\n{ended.text[-3000:]}"


def misses(planted: Planted, code: int, out: str, text: str) -> list[str]:
    """Which of verdict, step, parameter and cause are not what was written down beforehand."""
    raise NotImplementedError
