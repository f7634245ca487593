"""Check of a stage split in one process: running all stages in order must give the result of the full model."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import LayoutError, user_line
from paceline.parallel.module_access.blocks import NoChain
from paceline.parallel.module_access.user_call_isolation import side_effect_free
from paceline.parallel.pipeline.chain.split import StageSplit
from paceline.parallel.pipeline.chain.stages import Stages
from paceline.parallel.pipeline.stage_io import TensorPath, tensors_in
from paceline.torch_internals.private_api import CallInterceptor
from paceline.torch_internals.rng import seed_torch

_ROUNDING_TOLERANCE = 1e-5


def compare_stagewise(model: nn.Module, *, split: StageSplit, call: Callable[[], Any], has_values: bool = True) -> None:
    """Run a model stage by stage on one example, without gradients, and compare the result with that of a full forward.

    Modules of other stages return NaN, which reveals values that are needed but not sent. Hooks on the blocks of other
    stages are not called, so values that they record are missing. Each stage starts with the unchanged model and with
    the random generators as at the start of the full forward, as in a separate process. Each block draws from its own
    random stream. With `has_values=False`, the tensors have no values and are not compared.

    Raises:
        NoChain: a stage fails, or the last stage's result differs from that of the full model.
    """
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.no_grad(), _seeded_blocks(model, split.blocks):
            with side_effect_free(model):
                expected = dict(tensors_in(call()))
            actual = dict(tensors_in(_run_stagewise(model, split, call)))
        if has_values:
            _refuse_differences(expected, actual)
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def _seeded_blocks(model: nn.Module, blocks: Sequence[str]) -> Iterator[None]:
    """Seed torch's generators with the block's number for each call of a block, and restore them afterwards.

    A stage does not run the blocks of other stages, so draws inside blocks must not affect the draws after them. The
    generators of Python and NumPy are not seeded, because a stage cannot repeat their draws.
    """
    gpu = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else None

    def call_seeded(number: int, original_call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        cpu_state, gpu_state = torch.get_rng_state(), None if gpu is None else torch.cuda.get_rng_state(gpu)
        seed_torch(number)
        try:
            return original_call(*args, **kwargs)
        finally:
            torch.set_rng_state(cpu_state)
            if gpu_state is not None and gpu is not None:
                torch.cuda.set_rng_state(gpu_state, gpu)

    with ExitStack() as stack:
        for number, name in enumerate(blocks):
            stack.callback(CallInterceptor(model.get_submodule(name), partial(call_seeded, number)).undo)
        yield


def _run_stagewise(model: nn.Module, split: StageSplit, call: Callable[[], Any]) -> Any:
    """Run all stages in order in this process, and return the result of the last stage."""
    stages = Stages(model, split=split, owned_stages=range(split.num_stages))
    output: Any = None
    try:
        for index in range(split.num_stages):
            with side_effect_free(model):
                output = stages.run(index, output, call)
    except torch.OutOfMemoryError:
        raise
    except LayoutError as error:
        raise NoChain(error.what, where=error.where, cause=error.cause, hint=error.hint) from error
    except Exception as error:
        raise NoChain(
            f"the forward needs more than its blocks return: stage {index}, which runs the blocks from "
            f"{split.blocks[split.stages[index].start]}, ends with {type(error).__name__}: {error}",
            where=str(user_line(error) or ""),
            cause="a list that the blocks or hooks on them fill, or an attribute that they set",
            hint="pass the value from block to block, or put its writer and its reader on one stage: --place.stages",
        ) from error
    finally:
        stages.close()
    return output


def _refuse_differences(expected: dict[TensorPath, Tensor], actual: dict[TensorPath, Tensor]) -> None:
    for path, full_tensor in expected.items():
        staged_tensor = actual.get(path)
        name = f"the value at {'.'.join(map(str, path))}" if path else "the result"
        if staged_tensor is None or staged_tensor.shape != full_tensor.shape:
            raise NoChain(
                f"run in stages, the model returns a different structure than when run whole: {name} differs."
            )
        if not full_tensor.is_floating_point():
            differs = not torch.equal(full_tensor, staged_tensor)
        else:
            distance = (staged_tensor.double() - full_tensor.double()).norm()
            is_close = bool(distance <= _ROUNDING_TOLERANCE * full_tensor.double().norm())
            differs = not is_close and bool(full_tensor.isfinite().all())
        if differs:
            is_nan = full_tensor.is_floating_point() and bool(staged_tensor.isnan().any())
            raise NoChain(
                f"run in stages, the model returns a different result than when run whole: {name} "
                + ("is NaN, because a stage reads a value that only an earlier stage has." if is_nan else "differs."),
                cause="state that a forward keeps outside of its blocks' arguments and results",
                hint="pass the state from block to block, or cut elsewhere: --place.stages",
            )
