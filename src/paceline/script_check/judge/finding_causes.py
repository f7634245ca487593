"""Causes of findings that other parts of the recording show: unequal loss scales, a framework, an earlier fault."""

from collections.abc import Sequence
from dataclasses import replace

from paceline.script_check.judge.script_finding import ScriptFinding
from paceline.script_check.judge.script_run import ScriptRun

_PARTING = (
    "gradients-own",
    "gradients-scaled-otherwise",
    "gradients-unequal",
    "parameter-reduced-otherwise",
    "settings-differ",
)
"""Findings after which the ranks have different weights, so that their later gradients say little."""
_LIGHTNING_HINT = (
    'Trainer(devices=2, strategy="ddp"), with as many devices as torchrun starts processes, or start the script with'
    " python; Lightning wraps the model then"
)


_SHARD_HINT = (
    "; or, if gradients are clipped: model.clip_grad_norm_(), because torch's clip_grad_norm_ sees only the shard of"
    " its rank under FSDP1"
)


def with_known_causes(findings: Sequence[ScriptFinding], run: ScriptRun) -> list[ScriptFinding]:
    """Return the findings, with the words of a cause that the recording shows; later effects of one are left out."""
    found = [_with_framework(_with_loss_scales(finding, run), run) for finding in findings]
    parted = min((each.step for each in found if each.name in _PARTING and not each.is_note), default=None)
    return [
        each
        for each in found
        if parted is None or each.step <= parted or not each.name.startswith(("gradients-", "reduction-"))
    ]


def _with_loss_scales(finding: ScriptFinding, run: ScriptRun) -> ScriptFinding:
    """Return a finding about unequal factors with the unequal scales of the ranks' `GradScaler`, if they have some."""
    if finding.name not in ("gradients-scaled-otherwise", "gradients-unequal"):
        return finding
    step = next((each for each in run.steps if each.number == finding.step and _unequal_scales(each.ranks)), None)
    if step is None:
        return finding
    scales = " and ".join(f"{rank.loss_scales[0]:g}" for rank in step.ranks[:2])
    return replace(
        finding,
        text=f"the GradScalers of ranks 0 and 1 have different scales, {scales}, so that {finding.text}",
        hint="GradScaler with the same init_scale on all ranks; without DistributedDataParallel, tell all ranks when"
        " one of them finds an infinite gradient",
    )


def _unequal_scales(ranks: Sequence[object]) -> bool:
    return len({getattr(rank, "loss_scales", ())[:1] for rank in ranks}) > 1


def _with_framework(finding: ScriptFinding, run: ScriptRun) -> ScriptFinding:
    """Return a finding about ranks that train apart with what a user of Lightning types."""
    is_lightning = any(rank.framework == "Lightning" for step in run.steps for rank in step.ranks)
    is_wrapped = any(rank.wrappers for step in run.steps for rank in step.ranks)
    if finding.name == "gradients-own" and is_lightning and not is_wrapped:
        return replace(finding, hint=_LIGHTNING_HINT)
    is_flat = any("FullyShardedDataParallel" in rank.wrappers for step in run.steps for rank in step.ranks)
    if is_flat and finding.name in ("parameter-reduced-otherwise", "reduction-unexplained"):
        return replace(finding, hint=finding.hint + _SHARD_HINT)
    return finding
