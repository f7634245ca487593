"""The loss contract: a loss returns sums and counts, and Paceline divides once, by the *global* counts.

A mean of means is wrong: `(x1/n1 + x2/n2) / 2` is not `(x1 + x2) / (n1 + n2)`. With a mean per microbatch or per rank,
the weight of a sample would depend on the size of its microbatch.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, is_grad_enabled, nn

from paceline.errors import JobError
from paceline.job import Job
from paceline.step.loss.batch_mismatch import batch_mismatch_error
from paceline.step.loss.frozen_parameters import FrozenParameters
from paceline.step.loss.mean_or_sum_probe import MEAN_WITH_COUNT, LossFault, find_loss_fault
from paceline.step.loss.model_loss import DIVISOR, ModelLoss
from paceline.torch_internals.scalars import as_number

Number = Tensor | float
Terms = dict[str, tuple[Tensor, Number]]
"""The `(sum, count)` of each loss term of a microbatch, by name."""
SINGLE_TERM = "loss"
COUNT_HINT = "return (loss_sum, how many targets it sums over)"


class LossContract:
    """The loss of one job; its methods check the values that the user's functions return.

    `probes_model_loss=False` skips the trial call that tests the model's own loss, for runs on simulated values. If
    `run_sum_check` finds that the loss is not a sum over samples, `note` tells the user so. Otherwise, `note` is empty.
    """

    def __init__(self, *, job: Job, model: nn.Module, probes_model_loss: bool = True) -> None:
        self._job = job
        self._model_loss = ModelLoss(
            model, takes_divisor=probes_model_loss and job.forward is None and _accepts_argument(model, DIVISOR)
        )
        self._accepted_names = _accepted_names(model)
        self._forward = model.forward
        self._frozen_parameter_checks = FrozenParameters(model).checks
        self._is_sum_check_requested = False
        self.note = ""

    @property
    def has_early_counts(self) -> bool:
        """True if counts are known before the forward, so that the loss is divided before backward."""
        return self._job.count is not None

    @property
    def over_batch(self) -> bool:
        """True if the loss takes the outputs of the whole global batch at once."""
        return self._job.loss_over == "batch"

    @property
    def is_model_loss(self) -> bool:
        """True if the model computes its own loss."""
        return self._job.loss is None

    def mark_labels_shifted(self) -> None:
        """Treat labels as shifted before the forward: context parallelism shifts them before it slices sequences."""
        self._model_loss.stop_probing(are_labels_shifted=True)

    def probe_model_loss(self, batch: Any) -> None:
        """Test on one microbatch, before the model is split, whether the model's own loss is a sum or a mean."""
        if self._job.loss is None and isinstance(batch, Mapping):
            self._model_loss.probe_if_untested(
                {name: value for name, value in batch.items() if name in self._accepted_names}
            )
            self._model_loss.stop_probing()

    def request_sum_check(self) -> None:
        """Request that the next microbatch checks whether the loss is a sum over samples, and sets `note` if not."""
        self._is_sum_check_requested = self._job.loss is not None and self._job.loss_over != "batch"

    def run_sum_check(self, output: Any, batch: Any, terms: Terms) -> None:
        """Check on this microbatch whether the loss is a sum over samples, if `request_sum_check` was called."""
        if self._is_sum_check_requested and list(terms) == [SINGLE_TERM]:
            fault = find_loss_fault(self._job.loss, output, batch, terms[SINGLE_TERM])
            self.note = "" if fault is None else _fault_note(fault)
        self._is_sum_check_requested = False

    def counts(self, batch: Any) -> dict[str, Number]:
        """Return the counts of one microbatch, before its forward."""
        assert self._job.count is not None
        returned = self._job.count(batch)
        counts_by_name = dict(returned) if isinstance(returned, Mapping) else {SINGLE_TERM: returned}
        return {str(name): _to_count(str(name), value) for name, value in counts_by_name.items()}

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """Return the model's output on one microbatch.

        Raises:
            JobError: the forward does not accept the batch, or a frozen parameter was unfrozen.
        """
        try:
            return self._output(model, batch)
        finally:  # a pipeline stage ends its part of the forward with an exception
            for check in self._frozen_parameter_checks:
                check()

    def _output(self, model: nn.Module, batch: Any) -> Any:
        """Return the model's output under the job's `forward=`, or under the default forward."""
        if self._job.forward is None:
            return self._call_model(model, batch)
        output = self._job.forward(model, batch)
        if output is None:
            raise JobError("forward= returned None.", hint="forward=lambda model, batch: model(...): return the output")
        return output

    def _call_model(self, model: nn.Module, batch: Any) -> Any:
        """Return the model's output under the default forward, which passes the batch as the model's arguments."""
        args, kwargs = self._arguments(batch)
        try:
            return model(*args, **kwargs)
        except TypeError:
            mismatch = batch_mismatch_error(self._forward, batch, args, kwargs)
            if mismatch is None:
                raise
            raise mismatch from None

    def _arguments(self, batch: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the positional and keyword arguments that the default forward passes to the model."""
        if isinstance(batch, Tensor):
            return [batch], {}
        if isinstance(batch, Mapping):
            return [], self._select_arguments(batch)
        if isinstance(batch, tuple | list) and len(batch) >= 2:
            return batch[:-1], {}
        raise JobError(
            f"the batch is a {type(batch).__name__}, which the default forward can't pass to the model.",
            hint="forward=lambda model, batch: model(...)",
        )

    def terms(self, output: Any, batch: Any, *, num_samples: int) -> Terms:
        """Return the `(sum, count)` of each loss term of one microbatch, by name."""
        if self._job.loss is None:
            return {SINGLE_TERM: self._model_loss.term(output, batch, num_samples=num_samples)}
        if _is_torch_loss(self._job.loss) and not isinstance(batch, Tensor):
            raise JobError(
                f"loss= is a {type(self._job.loss).__name__}, which takes (output, target), not (output, batch).",
                hint="loss=lambda output, batch: (F.cross_entropy(output, batch[-1], reduction='sum'), len(output))",
            )
        returned = self._job.loss(output, batch)
        if isinstance(returned, Mapping):
            return {str(name): _to_sum_and_count(name, value) for name, value in returned.items()}
        if isinstance(returned, tuple):
            return {SINGLE_TERM: _to_sum_and_count(SINGLE_TERM, returned)}
        if isinstance(returned, Tensor):
            return {SINGLE_TERM: (_to_scalar(SINGLE_TERM, returned) * num_samples, float(num_samples))}
        raise JobError(
            f"loss= returned a {type(returned).__name__}.",
            cause="expected (loss_sum, count), a dict of them, or a scalar tensor",
            hint="return F.cross_entropy(output, target, reduction='sum'), target.numel()",
        )

    def multiply_next_loss(self, factor: float, *, on_use: Callable[[], None]) -> None:
        """Multiply the loss sums of the next training microbatch by `factor`, to inject a fault.

        `on_use` is called when that happens. An evaluation in between is left as it is. Exact mode may compute a
        microbatch several times.
        """
        compute_terms = self.terms
        faulty_batches: list[Any] = []

        def multiplied_terms(output: Any, batch: Any, *, num_samples: int) -> Terms:
            if not is_grad_enabled():
                return compute_terms(output, batch, num_samples=num_samples)
            if not faulty_batches:
                faulty_batches.append(batch)
                on_use()
            terms = compute_terms(output, batch, num_samples=num_samples)
            if batch is not faulty_batches[0]:
                return terms
            return {name: (loss_sum * factor, count) for name, (loss_sum, count) in terms.items()}

        self.terms = multiplied_terms  # type: ignore[method-assign]

    def _select_arguments(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        arguments = {name: value for name, value in batch.items() if name in self._accepted_names}
        if self._job.loss is not None:
            arguments.pop("labels", None)
            return arguments
        return self._model_loss.forward_arguments(arguments)


def _fault_note(fault: LossFault) -> str:
    """Return the note for the user on a loss that is not a sum over samples."""
    if fault.kind == MEAN_WITH_COUNT:
        return (
            f"loss= returns a mean with a count: it is divided by the count again. {COUNT_HINT}: "
            "reduction='sum' in most losses of torch (docs/loss.md)"
        )
    first, second = fault.halves
    measured = f"{fault.full:.4g} for a microbatch, {first:.4g} and {second:.4g} for its halves"
    fault_text = (
        "returns a scalar that is not the mean over samples" if fault.is_scalar else "is not a sum over samples"
    )
    return (
        f"loss= {fault_text} ({measured}), so the training depends on train.micro_batch_size, even in one "
        f"process. {COUNT_HINT}; "
        'loss_over="batch" for a loss that compares samples with each other (docs/loss.md)'
    )


def _to_sum_and_count(name: object, value: Any) -> tuple[Tensor, Number]:
    """Return the `(sum, count)` of a loss term, after a check of the returned value."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise JobError(f"loss term {name!r} is not a (sum, count) pair.", hint=f"{{{name!r}: (loss_sum, count)}}")
    if _is_swapped(*value):
        raise JobError(
            f"loss term {name!r} is (count, sum), expected (sum, count).",
            cause="the first value has no gradient, but the second has one",
            hint="return loss_sum, count",
        )
    return _to_scalar(str(name), value[0]), _to_count(str(name), value[1])


def _is_swapped(total: Any, count: Any) -> bool:
    return isinstance(count, Tensor) and count.requires_grad and not (isinstance(total, Tensor) and total.requires_grad)


def _to_scalar(name: str, value: Any) -> Tensor:
    """Return the sum of a loss term as a tensor without dimensions, after a check."""
    if not isinstance(value, Tensor) and as_number(value) is not None:
        raise JobError(
            f"the sum of loss term {name!r} is a {type(value).__name__}, expected a scalar tensor.",
            cause="loss.item() or float(loss): a number has no gradient",
            hint="return the tensor itself",
        )
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise JobError(
            f"the sum of loss term {name!r} has shape {shape}, expected a scalar tensor.",
            cause="a loss with reduction='none' was not summed",
            hint="return loss.sum() and its count: (loss.sum(), loss.numel())",
        )
    if value.is_complex():
        raise JobError(f"the sum of loss term {name!r} is complex.", hint="loss.abs(), or loss.real: a real number")
    return value if value.dim() == 0 else value.reshape(())


def _to_count(name: str, value: Any) -> Number:
    """Return the count of a loss term as a number or a tensor without dimensions, after a check."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise JobError(
                f"the count of loss term {name!r} has shape {tuple(value.shape)}, expected one number.",
                hint="mask.sum()",
            )
        if value.device.type == "cpu":
            check_count(name, float(value))
        return value.detach() if value.dim() == 0 else value.detach().reshape(())
    number = value if isinstance(value, int | float) else as_number(value)
    if number is None:
        raise JobError(
            f"the count of loss term {name!r} is a {type(value).__name__}, expected a number.", hint=COUNT_HINT
        )
    return check_count(name, float(number))


def check_count(name: str, number: float) -> float:
    """Check `number`, the count of a loss term, and return it.

    Raises:
        JobError: the count is negative or not finite.
    """
    if not 0.0 <= number < math.inf:
        raise JobError(
            f"the count of loss term {name!r} is {number:g} for a microbatch, which is not a number of targets.",
            hint=COUNT_HINT,
        )
    return number


def _is_torch_loss(loss: Any) -> bool:
    return type(loss).__module__ == "torch.nn.modules.loss"


def _accepts_argument(model: nn.Module, name: str) -> bool:
    """Return whether the forward has this parameter, or passes any keyword to the model's `loss_function`."""
    parameters = inspect.signature(model.forward).parameters
    accepts_any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return name in parameters or (accepts_any_keyword and hasattr(model, "loss_function"))


def _accepted_names(model: nn.Module) -> frozenset[str]:
    return frozenset(inspect.signature(model.forward).parameters)
