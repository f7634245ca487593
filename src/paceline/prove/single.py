"""The first rung: one process against itself. What fails here no layout can mend."""

from collections.abc import Callable

from paceline.place.batchnorm import running
from paceline.prove.lockstep import ROUNDING, Finding
from paceline.prove.noise import distance
from paceline.prove.reference import Reference
from paceline.torch_private import DropoutBase
from paceline.world import World

_SUM = 1e-3


def run_single(make: Callable[[], Reference], *, is_main: bool, world: World) -> Finding:
    """The same batch twice, then in halves: is the job deterministic, and is its loss a sum?"""
    finding = Finding()
    if is_main:
        _twice(make, finding)
        _halves(make, finding)
    return Finding(**world.share_json(dict(vars(finding))))


def _twice(make: Callable[[], Reference], finding: Finding) -> None:
    first = make().gradient(step=0, epoch=0, position=0).total()
    second = make().gradient(step=0, epoch=0, position=0).total()
    apart = {name: distance(value, second[name]) for name, value in first.items()}
    worst = max(apart, key=lambda name: apart[name])
    if apart[worst] > 0.0 or first.keys() != second.keys():
        finding.note(ROUNDING, difference=apart[worst])
        finding.detail = f"The job is not deterministic: the same batch twice differs in {worst}."
    else:
        finding.detail = "Deterministic."


def _halves(make: Callable[[], Reference], finding: Finding) -> None:
    """Two half microbatches must add up to the whole, where samples do not see each other."""
    reference = make()
    if running(reference.model) or _draws(reference):
        finding.detail += " Halves were not compared: samples of a microbatch share statistics or random numbers."
        return
    given = reference.batches(epoch=0, position=0)[:1]
    part, _ = given[0]
    if len(part) < 2:
        return
    middle = len(part) // 2
    halves = [(p, reference.read(epoch=0, part=p)) for p in (part[:middle], part[middle:])]
    whole = make().gradient_of(given, step=0)
    parts = make().gradient_of(halves, step=0)
    right, found = whole.total(), parts.total()
    size = sum(float(v.double().norm()) ** 2 for v in right.values()) ** 0.5
    apart = sum(distance(value, found[name]) ** 2 for name, value in right.items()) ** 0.5
    if apart > _SUM * size:
        finding.detail += " The loss is not a sum over samples: halves of a microbatch do not add up to it."
    else:
        finding.detail += " The loss is a sum over samples."


def _draws(reference: Reference) -> bool:
    model = reference.model
    return any(isinstance(m, DropoutBase) and m.p > 0 for m in model.modules())
