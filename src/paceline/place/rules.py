"""The job's optimizer on shares: the groups are learned on the whole model, the work is done on local tensors.

A rule that treats each element by itself is right on any cut. Whether a rule does is not read off its name: a copy
of it runs a few steps on a small random matrix and on the two halves of it, and the results are compared.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import JobError, LayoutError
from paceline.place.shard.share import Share
from paceline.place.units import Named

Pairs = list[tuple[str, nn.Parameter]]
_STEPS, _ROWS = 3, 7
_FIELDS = ("state", "param_groups")


def meta_pairs(named: Sequence[Named]) -> Pairs:
    """The whole model's parameters as shapes without memory, for the job's factory."""
    return [
        (m.name, nn.Parameter(torch.empty(m.parameter.shape, dtype=m.parameter.dtype, device="meta"))) for m in named
    ]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The job's optimizers over `pairs`, the whole model's parameters."""

    pairs: Pairs
    optimizers: Sequence[Optimizer]

    def whole(self, *, exact: bool = False) -> dict[str, str]:
        """The parameters whose rule looks at whole tensors, with what it is that differs.

        Raises:
            JobError: a rule that no cut gets right.
        """
        names = {id(p): name for name, p in self.pairs}
        found: dict[str, str] = {}
        for optimizer in self.optimizers:
            _refuse_across(optimizer)
            for group in optimizer.param_groups:
                reason = _difference(optimizer, group, exact=exact, dim=0)
                if reason:
                    found |= {names[id(p)]: reason for p in group["params"] if p.dim()}
        return found

    def refuse_rows(self, *, layout: str, exact: bool = False) -> None:
        """For layouts that cut every parameter into rows.

        Raises:
            LayoutError: the rule that is not right on rows, by name.
        """
        whole = self.whole(exact=exact)
        for name, reason in whole.items():
            raise LayoutError(
                f"{reason}, and {layout} cuts {name} into rows.",
                cause="the update rule looks at a whole tensor",
                hint=f"--layout zero1 or zero2, which give such parameters whole to one rank each; or "
                f"torch.optim.AdamW{' without fused=True' if exact else ''}",
            )

    def refuse_apart(self) -> None:
        """For layouts in which a rank's optimizer has some of the parameters.

        Raises:
            JobError: a rule that looks at several at once.
        """
        for optimizer in self.optimizers:
            _refuse_across(optimizer)

    def refuse_pieces(self, cut: Collection[str], *, layout: str) -> None:
        """For the parameters of which this rank has a piece, along whatever dimension.

        Raises:
            LayoutError: the rule that is not right on pieces, by name.
        """
        names = {id(p): name for name, p in self.pairs}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                name = next((names[id(p)] for p in group["params"] if names[id(p)] in cut and p.dim() > 1), None)
                reason = name and any(_difference(optimizer, group, exact=False, dim=dim) for dim in (0, -1))
                if reason:
                    raise LayoutError(
                        f"{type(optimizer).__name__} looks at whole matrices, and {layout} leaves pieces of {name}.",
                        cause="its step on a piece of a matrix is another one than on the whole",
                        hint="--layout ddp, zero1, zero2 or pp, where a matrix stays whole; or torch.optim.AdamW",
                    )

    def on(self, shares: Sequence[Named]) -> list[Optimizer]:
        """The same optimizers, groups and options over the shares; a parameter without a share is left out.

        Called once: the optimizers themselves move.
        """
        local = {share.name: share.parameter for share in shares}
        names = {id(p): name for name, p in self.pairs}
        return [_moved(optimizer, local, names) for optimizer in self.optimizers]


def learn(factory: Callable[[Pairs], Any], named: Sequence[Named]) -> Rules:
    """Call the job's factory once, on shapes.

    Raises:
        JobError: it gives no optimizer, or looks at values.
    """
    pairs = meta_pairs(named)
    try:
        made = factory(pairs)
    except (NotImplementedError, RuntimeError) as error:
        raise JobError(
            f"optimizer= failed on parameters without memory: {error}",
            cause="it reads their values; a sharded layout learns its groups from names and shapes",
            hint="optimizer=lambda named: torch.optim.AdamW([p for _, p in named])",
        ) from error
    optimizers = list(made) if isinstance(made, list | tuple) else [made]
    return Rules(pairs=pairs, optimizers=optimizers)


def shared_optimizers(
    factory: Callable[[Pairs], Any],
    named: Sequence[Named],
    shares: Sequence[Share],
    *,
    layout: str,
    exact: bool = False,
) -> list[Optimizer]:
    """The job's optimizers over shares that are cut by rows.

    Raises:
        JobError, LayoutError: the factory or a rule does not fit.
    """
    rules = learn(factory, named)
    rules.refuse_rows(layout=layout, exact=exact)
    return rules.on(shares)


def _moved(optimizer: Optimizer, local: Mapping[str, nn.Parameter], names: Mapping[int, str]) -> Optimizer:
    """In place, since named groups may not be empty when they are made, and a share's rows may be."""
    groups = [_group(group, local, names) for group in optimizer.param_groups]
    if optimizer.state:
        return _built_again(optimizer, groups)
    _refuse_own_references(optimizer, names)
    optimizer.param_groups[:] = groups
    return optimizer


def _group(group: Mapping[str, Any], local: Mapping[str, nn.Parameter], names: Mapping[int, str]) -> dict[str, Any]:
    here = [names[id(p)] for p in group["params"] if names[id(p)] in local]
    found = {**group, "params": [local[name] for name in here]}
    if "param_names" in group:
        found["param_names"] = here
    return found


def _built_again(optimizer: Optimizer, groups: Sequence[dict[str, Any]]) -> Optimizer:
    """One that makes its state at once is made anew, with the same defaults, where its tensors are."""
    kind = type(optimizer)
    plain = [{k: v for k, v in group.items() if k != "param_names"} for group in groups]
    try:
        made = kind(plain, **optimizer.defaults)
    except (TypeError, ValueError, RuntimeError) as error:
        raise JobError(
            f"{kind.__name__} makes its state when it is built, and can't be built again from its defaults: {error}",
            cause="its state must lie beside each rank's own rows",
            hint="make the state in step(), as torch's own optimizers do",
        ) from error
    made.param_groups[:] = list(groups)
    return made


def _refuse_own_references(optimizer: Optimizer, names: Mapping[int, str]) -> None:
    for field, value in vars(optimizer).items():
        if field not in _FIELDS and any(id(tensor) in names for tensor in _tensors(value)):
            raise JobError(
                f"{type(optimizer).__name__}.{field} holds parameters of its own.",
                cause="each rank steps on its own rows, which such a reference does not know",
                hint="read self.param_groups in step(), or --layout ddp",
            )


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [t for key, item in value.items() for t in (*_tensors(key), *_tensors(item))]
    return [t for item in value for t in _tensors(item)] if isinstance(value, list | tuple | set) else []


# -- whether a rule is right on a cut


def _difference(optimizer: Optimizer, group: Mapping[str, Any], *, exact: bool, dim: int) -> str:
    """Empty where what is cut along `dim` may be updated alone; otherwise what was seen."""
    kind = type(optimizer).__name__
    for dims in sorted({p.dim() for p in group["params"] if p.dim()}):
        shape = (_ROWS, 5, 3, 2, 2)[:dims] if dims <= 5 else (_ROWS, *(2,) * (dims - 1))
        whole, gradients = _drawn(shape, exact)
        sizes = [(whole.shape[dim] + 1) // 2, whole.shape[dim] // 2]
        starts, steps = whole.split(sizes, dim), [g.split(sizes, dim) for g in gradients]
        try:
            alone = _stepped(optimizer, group, [whole], [[g] for g in gradients])[0]
            halves = [_stepped(optimizer, group, [starts[n]], [[g[n]] for g in steps])[0] for n in (0, 1)]
        except Exception as error:
            return f"{kind} could not be tried on a small matrix ({type(error).__name__}: {error})"
        if not _same(alone, torch.cat(halves, dim), exact):
            rows = "bits" if exact else "values"
            return f"{kind} gives other {rows} on the two halves of a matrix than on the whole"
    return ""


def _refuse_across(optimizer: Optimizer) -> None:
    group = next((g for g in optimizer.param_groups if g["params"]), None)
    if group is None:
        return
    dims = max(p.dim() for p in group["params"])
    shape = (_ROWS, 5, 3, 2, 2)[:dims]
    (one, first), (two, second) = _drawn(shape, False), _drawn(shape, False, seed=1)
    try:
        both = _stepped(optimizer, group, [one, two], [[a, b] for a, b in zip(first, second, strict=True)])
        alone = _stepped(optimizer, group, [one], [[a] for a in first])[0]
    except Exception:
        return  # the other try names it
    if not _same(both[0], alone, False):
        raise JobError(
            f"{type(optimizer).__name__} moves a parameter otherwise beside a second one than alone.",
            cause="it looks at several parameters at once, or draws random numbers",
            hint="--layout ddp, where every rank has all of them",
        )


def _drawn(shape: Sequence[int], exact: bool, seed: int = 0) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float32 if exact else torch.float64
    drawn = [torch.randn(*shape, generator=generator, dtype=dtype) for _ in range(_STEPS + 1)]
    return drawn[0], drawn[1:]


def _stepped(
    optimizer: Optimizer, group: Mapping[str, Any], starts: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """Where a copy of the rule takes the tensors in a few steps."""
    parameters = [nn.Parameter(start.clone()) for start in starts]
    options = {k: copy.deepcopy(v) for k, v in group.items() if k not in ("params", "param_names")}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        probe = _copied(optimizer, {**options, "params": parameters})
        for step in gradients:
            for parameter, gradient in zip(parameters, step, strict=True):
                parameter.grad = gradient.clone()
            probe.step()
    return [parameter.detach() for parameter in parameters]


def _copied(optimizer: Optimizer, group: dict[str, Any]) -> Optimizer:
    if optimizer.state:
        return _built_again(optimizer, [group])
    probe = object.__new__(type(optimizer))
    own = {k: copy.deepcopy(v) for k, v in vars(optimizer).items() if k not in _FIELDS}
    vars(probe).update({**own, "param_groups": [group], "state": defaultdict(dict)})
    return probe


def _same(one: Tensor, other: Tensor, exact: bool) -> bool:
    return torch.equal(one, other) if exact else torch.allclose(one, other, rtol=1e-9, atol=1e-12)
