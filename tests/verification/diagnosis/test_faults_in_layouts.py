"""Faults planted in every layout, with what the user must be told, written before reading the diagnosis.

At the first run, of 30: 27 called different, 2 refused before launch by the check of the cut sequence, and one without
effect (a stream that a border did not hand on was the same anyway), which was planted anew by then knowing the finder.
Told wholly as written down beforehand: 4 of the 27; since causes look at the placing, all.
"""

import json
import re

import pytest

from tests.conftest import Shop
from tests.verification.diagnosis.fault_in_layout import Misplaced
from tests.verification.diagnosis.faults_in_sharding_and_pipeline import IN_STAGES
from tests.verification.diagnosis.faults_in_tensor_context_experts import IN_TENSORS

FAULTS = [*IN_TENSORS, *IN_STAGES]
CODES = {"different": 4, "refused": 2}


@pytest.mark.parametrize(
    "planted", [pytest.param(p, id=p.name, marks=[] if p.quick else [pytest.mark.soak]) for p in FAULTS]
)
def test_the_fault_is_named_with_its_place(shop: Shop, planted: Misplaced) -> None:
    shop.write("job.py", planted.job())
    ended = shop.run(*planted.command(), timeout=240)
    answer = json.loads(ended.out)
    first = answer.get("first_difference")
    verdict = answer.get("verdict", "refused")
    told = answer["what"] if verdict == "refused" else answer["lines"][-1]
    assert (verdict, ended.code) == (planted.verdict, CODES[planted.verdict]), ended.text[-3000:]
    if first is not None:
        assert first["step"] in planted.steps
        assert first["parameter"].startswith(planted.parameters or ("",)), told
    missed = [words for words in planted.says if not re.search(words, told, re.I)]
    assert not missed, f"{missed}\nshould: {planted.should}\ntold: {told}"
