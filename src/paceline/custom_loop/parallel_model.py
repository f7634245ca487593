"""A model that `pl.place` has placed: its gradients, optimizers and saved files, for any training loop."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.comm.mesh_groups import MeshGroups
from paceline.config.layout import Layout
from paceline.custom_loop.gradient_guard import GradientGuard, GradientLeaves, ReplacedGradients
from paceline.custom_loop.placed_model_files import load_folder, save_folder
from paceline.errors import JobError, LayoutError, NonFiniteError, UsageError, raise_all
from paceline.parallel.batchnorm.norm_tape import norms_with_statistics
from paceline.parallel.gradients.joint_grad_norm import joint_norm
from paceline.parallel.module_access.parameters import NamedParameter
from paceline.parallel.placement import ParallelizedModel
from paceline.parallel.sharding.optimizer_offload import offload_state
from paceline.parallel.sharding.zero_sharded_optimizer import try_optimizer_factory
from paceline.planner.layout.mesh import layout_label
from paceline.trainer.checks.check_job import unfit_optimizers

Factory = Callable[[list[tuple[str, nn.Parameter]]], Any]


class PlacedModel:
    """A placed model. This rank trains on the samples of replica number `replica` of `replicas`.

    All ranks of one replica use the same samples. One optimizer step is: `backward` once or several times, `clip` if
    needed, `step()` of the optimizers. The first `backward` after a step or after `optimizer.zero_grad()` starts
    without gradients.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        parallelized: ParallelizedModel,
        worlds: MeshGroups,
        requested_layout: Layout,
        all_parameters: Sequence[NamedParameter],
    ) -> None:
        self.model = model
        self.world = worlds.all_ranks
        self.replica, self.replicas = worlds.data.rank, worlds.data.world_size
        self._parallelized, self._worlds, self._requested_layout, self._all_parameters = (
            parallelized,
            worlds,
            requested_layout,
            all_parameters,
        )
        self._optimizers: list[Optimizer] = []
        self._optimized_names: set[str] = set()
        self._is_accumulating = False  # True from the first backward of a step until its gradients are reduced
        self._has_run_backward = False
        self._stepped_optimizers: set[int] = set()  # the ids of those that have stepped since the last `backward`
        self._count: Tensor | None = None
        self._is_sharded = bool(worlds.mesh.zero) or not parallelized.optim_shards.is_unsharded
        self._gradient_guard = GradientGuard(parallelized, is_sharded=self._is_sharded)
        self._leaves = GradientLeaves(parallelized)
        self._uncopyable_modules = [] if parallelized.weights.is_unsharded else list(model.modules())
        for module in self._uncopyable_modules:
            vars(module)["__deepcopy__"] = _refuse_copy
        leaf_ids = {id(leaf) for leaf in parallelized.leaf_parameters}
        self._frozen_parameters = [
            (n, p) for n, p in model.named_parameters() if not p.requires_grad and id(p) not in leaf_ids
        ]

    def optimizer(self, factory: Factory) -> Any:
        """Return the optimizers that `factory` builds from (name, parameter) pairs of this rank's shards.

        The `step()` of each optimizer reduces the gradients first. Several calls may build optimizers for different
        parameters.

        Raises:
            JobError, LayoutError: `factory` returns no optimizer, a parameter would have two optimizers, or an update
                rule needs whole tensors.
        """
        optimizers, is_list = self._build_optimizers(factory)
        raise_all(unfit_optimizers(optimizers))
        self._claim_parameters(optimizers)
        for optimizer in optimizers:
            if "optimizer" in self._requested_layout.offload:
                offload_state(optimizer)
            optimizer.register_step_pre_hook(self._before_optimizer_step)
            optimizer.register_step_post_hook(self._after_optimizer_step)
        self._optimizers += optimizers
        return optimizers if is_list else optimizers[0]

    def backward(
        self, loss: Tensor, *, count: Tensor | float | None = None, last: bool = False, retain_graph: bool = False
    ) -> None:
        """Run backward for this model's parameters only. Other tensors that the loss depends on get no gradient.

        Args:
            loss: this rank's loss. Without `count`, gradients are averaged over the replicas, as
                DistributedDataParallel does. The gradients of several calls in one step add up.
            count: the number of items over which this rank's loss is a sum. Gradients are divided by the total count
                of all ranks and calls.
            last: True if no other call follows in this step. Under ddp and zero1, the reduction then overlaps with
                backward.
            retain_graph: as in torch.

        Raises:
            UsageError: one call of a step has a count, and another has none.
        """
        self._begin_backward(count)
        self._refuse_unfrozen()
        self._parallelized.reducer.before_backward(last=last)
        self._leaves.backward(loss, retain_graph=retain_graph)
        self._parallelized.reducer.after_backward()
        if self._is_sharded or self.replicas > 1 or count is not None:
            self._gradient_guard.hide()

    def clip(self, max_norm: float) -> Tensor:
        """Scale all gradients down to this norm, and return the norm before scaling."""
        with self._reduced_gradients():
            norm = self._gradient_norm()
            nn.utils.clip_grads_with_norm_([m.parameter for m in self._parallelized.named_parameters], max_norm, norm)
        return norm

    def norm(self) -> Tensor:
        """Return the norm of the whole gradient, the same on every rank. Every rank calls this."""
        with self._reduced_gradients():
            return self._gradient_norm()

    def gradients(self) -> dict[str, Tensor]:
        """Reduce the gradients, and return them by name. Every rank calls this.

        Under ddp, each gradient is full. Otherwise, it is this rank's shard. In-place changes affect `step()`.
        """
        with self._reduced_gradients():
            return {
                m.name: m.parameter.grad for m in self._parallelized.named_parameters if m.parameter.grad is not None
            }

    def whole(self) -> Mapping[str, Tensor]:
        """Return all full weights and buffers on every rank, for small models and tests. Every rank calls this."""
        weights = self._parallelized.weights
        return {name: weights.gather_full_tensor(name, weights.local_tensors[name].tensor) for name in weights.names}

    def save(self, path: str | Path) -> None:
        """Write weights and optimizers as plain safetensors, one full tensor at a time. Every rank calls this.

        No process holds the full model. `from_pretrained` and `load_file` can read `path/model.safetensors`.

        Raises:
            SaveError: the folder can't be written.
        """
        save_folder(
            Path(path), model=self.model, parallelized=self._parallelized, optimizers=self._optimizers, world=self.world
        )

    def load(self, path: str | Path) -> None:
        """Read what `save` has written, in this layout or another. Every rank calls this and reads its own shards.

        Raises:
            CheckpointError: the folder belongs to another model, or can't be read.
        """
        load_folder(Path(path), parallelized=self._parallelized, optimizers=self._optimizers, model=self.model)
        self._parallelized.sync_after_update()

    def close(self) -> None:
        """Put the gradients back, and remove the hooks of the model. The hooks of the optimizers stay."""
        self._gradient_guard.show()
        for module in self._uncopyable_modules:
            vars(module).pop("__deepcopy__", None)
        self._parallelized.reducer.close()
        self._parallelized.close()

    def _begin_backward(self, count: Tensor | float | None) -> None:
        """Begin a step with its first backward, or accumulate into the current step."""
        replaced = self._gradient_guard.show()
        names = {*replaced.set_to_none, *replaced.set_to_zero}
        optimized_names = self._optimized_names or {m.name for m in self._parallelized.named_parameters}
        if self._is_accumulating and names >= optimized_names:
            self._is_accumulating = False
        elif self._is_accumulating and names:
            raise UsageError(
                f"another backward follows, but only some gradients were zeroed, such as the gradient of {min(names)}.",
                cause="zero_grad() of one of several optimizers, or of a part of the model",
                hint="call zero_grad() of all optimizers; or step() of the optimizers that still have gradients",
            )
        elif self._has_run_backward and not self._is_accumulating and not self._stepped_optimizers:
            self._apply_zero_grads(replaced)
            if any(
                m.parameter.grad is not None and bool(m.parameter.grad.any())
                for m in self._parallelized.named_parameters
            ):
                raise UsageError(
                    "a backward follows after the gradients of this step were reduced.",
                    cause="clip, norm or gradients before the last backward of a step, or a missing step()",
                    hint="optimizer.zero_grad() to drop them; or clip after the last backward",
                )
        if not self._is_accumulating:
            self._parallelized.reducer.begin()
            self._is_accumulating, self._has_run_backward, self._count = True, True, None
            self._stepped_optimizers.clear()
        elif (self._count is None) != (count is None):
            raise UsageError(
                "some backward calls of this step have count= and others do not.",
                hint="count= in all backwards of a step, or in none",
            )
        if count is not None:
            local_count = torch.as_tensor(count, dtype=torch.float64, device=self.world.device).detach()
            self._count = local_count if self._count is None else self._count + local_count

    def _refuse_unfrozen(self) -> None:
        """Raise an error if a parameter that was frozen when the model was placed is trainable now."""
        unfrozen = next((name for name, parameter in self._frozen_parameters if parameter.requires_grad), None)
        if unfrozen is not None:
            raise UsageError(
                f"{unfrozen} was frozen when the model was placed, so no rank has a buffer for its gradient.",
                cause="requires_grad_(True) after pl.place",
                hint="leave it unfrozen in build=, and freeze it after pl.place: "
                "placed.model.layer.requires_grad_(False)",
            )

    @contextmanager
    def _reduced_gradients(self) -> Iterator[None]:
        """Return a context in which the gradients are reduced and readable. The exit hides sharded gradients again."""
        self._reduce_gradients()
        yield
        if self._is_sharded:
            self._gradient_guard.hide()

    def _gradient_norm(self) -> Tensor:
        gradients = [p.grad for p in self._parallelized.owned_parameters() if p.grad is not None]
        if self._parallelized.optim_shards.is_unsharded:
            return nn.utils.get_total_norm(gradients)
        return joint_norm(gradients, worlds=[self.world])

    def _before_optimizer_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Reduce the gradients before the step of an optimizer. Every step needs a `backward` of its own."""
        if id(optimizer) in self._stepped_optimizers:
            raise _missing_backward_error("since this optimizer's last step")
        self._reduce_gradients()

    def _after_optimizer_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Update the weights on other ranks, and hide sharded gradients, after the step of an optimizer."""
        self._stepped_optimizers.add(id(optimizer))
        self._parallelized.sync_after_update()
        if self._is_sharded:
            self._gradient_guard.hide(is_step_over=True)

    def _reduce_gradients(self) -> None:
        """Reduce the gradients, if this was not done yet in this step, and put them into `.grad`."""
        if not self._has_run_backward:
            raise _missing_backward_error("yet")
        replaced = self._gradient_guard.show()
        if self._is_accumulating:
            is_reduced = self._parallelized.reducer.finish(divisor=self._divisor())
            assert is_reduced
            self._is_accumulating = False
            for _, module in norms_with_statistics(self.model):
                for buffer in module.buffers(recurse=False):
                    self.world.broadcast(buffer)
        self._apply_zero_grads(replaced)

    def _apply_zero_grads(self, replaced: ReplacedGradients) -> None:
        """Apply to the reduced gradients what the user did to the placeholders: set them to None or to zero."""
        set_to_none, set_to_zero = set(replaced.set_to_none), set(replaced.set_to_zero)
        for member in self._parallelized.named_parameters if set_to_none or set_to_zero else ():
            if member.name in set_to_none:
                member.parameter.grad = None
            elif member.name in set_to_zero and member.parameter.grad is not None:
                member.parameter.grad.zero_()

    def _divisor(self) -> float | Tensor | None:
        """Return the number by which the summed gradients are divided, or None for no division."""
        if self._count is None:
            return float(self.replicas) if self.replicas > 1 else None
        total = self._worlds.summed.all_reduce(self._count)
        if total.device.type != "cpu":
            return total
        if not total:
            raise NonFiniteError(
                "the count over all ranks is 0, so the loss can't be divided by it.", hint="skip the batch"
            )
        return float(total)

    def _build_optimizers(self, factory: Factory) -> tuple[list[Optimizer], bool]:
        """Return the optimizers of this rank's shards, and True if `factory` returned a list or a tuple of them."""
        if self._parallelized.optim_shards.is_unsharded and not self._worlds.mesh.zero:
            result = factory([(m.name, m.parameter) for m in self._parallelized.named_parameters])
            is_list = isinstance(result, list | tuple)
            return (list(result) if is_list else [result]), is_list
        is_list = False

        def record_result(pairs: list[tuple[str, nn.Parameter]]) -> Any:
            nonlocal is_list
            result = factory(pairs)
            is_list = isinstance(result, list | tuple)
            return result

        sharded_factory = try_optimizer_factory(record_result, self._all_parameters)
        for name, reason in sharded_factory.full_tensor_reasons().items():
            raise LayoutError(
                f"{reason}, and {layout_label(self._requested_layout, self._worlds.mesh)} gives ranks parts of {name}.",
                cause="the update rule needs a whole tensor",
                hint='layout="ddp", or torch.optim.AdamW',
            )
        return sharded_factory.make_optimizers(self._parallelized.named_parameters), is_list

    def _claim_parameters(self, optimizers: Sequence[Any]) -> None:
        """Record which parameters have an optimizer. Refuse a second optimizer for a parameter."""
        names = {id(m.parameter): m.name for m in self._parallelized.named_parameters}
        for optimizer in optimizers:
            if not isinstance(optimizer, Optimizer):
                raise JobError(
                    f"the factory returned a {type(optimizer).__name__}, expected a torch.optim.Optimizer.",
                    hint="placed.optimizer(lambda named: torch.optim.AdamW(named, lr=1e-3))",
                )
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                name = names.get(id(parameter))
                if name is None or name in self._optimized_names:
                    raise JobError(
                        f"{name} has an optimizer already."
                        if name
                        else "an optimizer holds a parameter that is not the model's.",
                        hint="build the groups from the (name, parameter) pairs that the factory gets",
                    )
                self._optimized_names.add(name)


def _missing_backward_error(when: str) -> UsageError:
    return UsageError(
        f"placed.backward was not called {when}, so there are no gradients to reduce.",
        cause="loss.backward(), which does not reduce gradients over the ranks",
        hint="placed.backward(loss) before each step",
    )


def _refuse_copy(*_: Any) -> Any:
    """Refuse `copy.deepcopy`. This function replaces the `__deepcopy__` of modules."""
    raise LayoutError(
        "a placed model can't be copied if ranks hold parts of its weights: nothing would reduce the copy's gradients.",
        cause="copy.deepcopy, as torch.optim.swa_utils.AveragedModel does",
        hint="pl.place(build, ...) once more, and load() into it; or build().load_state_dict(placed.whole())",
    )
