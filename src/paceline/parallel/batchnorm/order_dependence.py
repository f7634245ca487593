"""Norms whose result depends on the order of microbatches, and the errors for ranks that can't keep that order."""

from dataclasses import dataclass

from paceline.errors import JobError

_WAIT = "--layout ddp, zero1 or zero2, whose ranks then run their forwards one after another"
_ALONE = "--ranks 1, or a loss over the samples of a microbatch, whose forwards can wait for others"
_SYNC = "; or --train.buffers sync_bn, which has the same statistics on every rank at every moment"


@dataclass(frozen=True, kw_only=True)
class OrderNeed:
    """The order dependence of the norm called `name` in a step, as seen by any rank.

    `reads`: it ran in eval mode as well as in training mode. `moves`: a forward changed its momentum, and `moves_on`:
    the next forward did too. `is_shown`: other code read its statistics, and `is_bypassed`: other code wrote to them.
    `is_repeated`: a backward ran it again.
    """

    name: str
    reads: bool = False
    moves: bool = False
    moves_on: bool = False
    is_shown: bool = False
    is_bypassed: bool = False
    is_repeated: bool = False

    @property
    def is_any(self) -> bool:
        """Return whether the order of microbatches matters."""
        return self.reads or self.moves or self.is_shown or self.is_bypassed

    @property
    def why(self) -> str:
        """Return the reason in a sentence."""
        if self.reads:
            return f"{self.name} runs in eval mode and in training mode in one step"
        if self.moves:
            return f"the forward moves the momentum of {self.name}"
        if not self.is_bypassed:
            return f"the forward or the loss looks at the running statistics of {self.name}"
        return f"the running statistics of {self.name} were written by something else than their running average"

    def refuse(self, *, over_batch: bool = False) -> None:
        """Refuse an order-dependent norm if microbatches run concurrently; a momentum changed only once is accepted.

        `over_batch`: the loss is over the whole batch, so no other layout and no sync_bn is offered as a way out.

        Raises:
            JobError: each rank would have other statistics than one process.
        """
        way = "no checkpointing around it" if self.is_repeated else _ALONE if over_batch else _WAIT
        meet = "" if over_batch else _SYNC
        if self.reads:
            raise JobError(
                f"{self.why}: what it shows in eval mode depends on the microbatches before it, which other ranks run "
                "at the same time.",
                cause="a pass in eval mode within a training forward (pseudo-labels, an adversarial step)",
                hint=f"{way}{meet}",
            )
        if self.moves_on:
            raise JobError(
                f"{self.why} from call to call: on several ranks it would have moved another number of times than in "
                "one process.",
                cause="a momentum that decays in the forward",
                hint=f"{way}; or set it by step or epoch (Job(on_eval=...)){meet}",
            )
        if self.is_bypassed:
            raise JobError(
                f"{self.why}.",
                cause="F.batch_norm(x, layer.running_mean, ...), code that assigns to statistics, or a custom layer",
                hint=f"call the layer itself; or {way}; or --train.buffers broadcast",
            )

    @property
    def stale(self) -> str:
        """Return a note if other code reads statistics that differ from those of one process; empty if none does."""
        if not self.is_shown:
            return ""
        return f"{self.why}: each rank has those from before the step, and of its own microbatches in it"
