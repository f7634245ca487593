"""Refuse norms whose result depends on the order of microbatches, if ranks can't run them in that order."""

from dataclasses import dataclass

from paceline.errors import JobError

_SEQUENTIAL_HINT = "--layout ddp, zero1 or zero2, whose ranks then run their forwards one after another"
_SINGLE_HINT = "--ranks 1, or a loss over the samples of a microbatch, so that forwards can run one after another"
_SYNC_BN_HINT = "; or --train.buffers sync_bn, with which all ranks always have the same statistics"


@dataclass(frozen=True, kw_only=True)
class OrderDependence:
    """The reasons why the norm `name` depends on the order of microbatches, on at least one rank."""

    name: str
    uses_eval_mode: bool = False
    """The norm ran in eval mode as well as in training mode."""
    momentum_changes: bool = False
    """A forward changed the momentum."""
    momentum_keeps_changing: bool = False
    """The next forward changed the momentum again."""
    is_read: bool = False
    """Code outside the norm read the running statistics."""
    is_bypassed: bool = False
    """Something other than the running average wrote to the statistics."""
    is_recomputed: bool = False
    """Backward ran the norm a second time, as activation checkpointing does."""

    @property
    def is_order_dependent(self) -> bool:
        """Return whether the result depends on the order of microbatches."""
        return self.uses_eval_mode or self.momentum_changes or self.is_read or self.is_bypassed

    @property
    def reason(self) -> str:
        """Return the reason as a sentence."""
        if self.uses_eval_mode:
            return f"{self.name} runs in eval mode and in training mode in one step"
        if self.momentum_changes:
            return f"the forward changes the momentum of {self.name}"
        if not self.is_bypassed:
            return f"the forward or the loss reads the running statistics of {self.name}"
        return f"the running statistics of {self.name} were written by other code than the running average"

    def refuse(self, *, over_batch: bool = False) -> None:
        """Refuse an order-dependent norm; call this if microbatches run concurrently.

        A single change of the momentum, and reads of the statistics, are not refused. `over_batch`: the loss is over
        the full batch, so the hint suggests neither another layout nor sync_bn.

        Raises:
            JobError: each rank would have different statistics from one process.
        """
        hint = "no checkpointing around it" if self.is_recomputed else _SINGLE_HINT if over_batch else _SEQUENTIAL_HINT
        sync_bn_hint = "" if over_batch else _SYNC_BN_HINT
        if self.uses_eval_mode:
            raise JobError(
                f"{self.reason}: its output in eval mode depends on earlier microbatches, which other ranks run at the "
                "same time.",
                cause="a pass in eval mode within a training forward (pseudo-labels, an adversarial step)",
                hint=f"{hint}{sync_bn_hint}",
            )
        if self.momentum_keeps_changing:
            raise JobError(
                f"{self.reason} from call to call: on several ranks the number of changes would differ from that in "
                "one process.",
                cause="a momentum that decays in the forward",
                hint=f"{hint}; or set it by step or epoch (Job(on_eval=...)){sync_bn_hint}",
            )
        if self.is_bypassed:
            raise JobError(
                f"{self.reason}.",
                cause="F.batch_norm(x, layer.running_mean, ...), code that assigns to statistics, or a custom layer",
                hint=f"call the layer itself; or {hint}; or --train.buffers broadcast",
            )

    @property
    def stale_note(self) -> str:
        """Return a note if other code reads the statistics, which differ from those of one process; else ""."""
        if not self.is_read:
            return ""
        return f"{self.reason}: in a step, each rank's statistics contain only its own microbatches"
