"""Check a plan's finalists: replay a step of the run on fake tensors, and run the checks that need real values."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from paceline.config.settings import Settings
from paceline.config.update_rule import parse_update
from paceline.errors import DataError, LayoutError, PacelineError, one_line_message
from paceline.launch.failures.oom_detection import is_out_of_memory
from paceline.measured_planning.depth_extrapolation import DepthExtrapolation
from paceline.measured_planning.memory_replay import StageMemory, shorten_plan
from paceline.measured_planning.split_trial import check_split_model
from paceline.planner.advice.recommendations import PlanRow
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.estimate import Estimate
from paceline.planner.cost.forecast_margins import bytes_margin
from paceline.planner.cost.layout_candidate import Candidate
from paceline.planner.cost.memory import MEMORY_PARTS, Memory
from paceline.planner.hardware.cluster import Device
from paceline.planner.layout.execution_plan import ExecutionPlan, JobFacts, Resources, make_execution_plan
from paceline.planner.model_costs.model_profile import ModelProfile
from paceline.trainer.setup.prepare import PreparedJob


@dataclass(frozen=True, kw_only=True)
class CheckedCandidate:
    """The result of a candidate's replay: the memory of the stage with the highest peak, or the `error` of a refusal.

    `parts` are the bytes of the peak by kind. `is_job_error` says whether the job's code raised the error. `seconds` is
    the duration of the replay. `num_blocks` is the number of blocks that the replay ran, times the
    microbatches.
    """

    layout: str
    peak_bytes: int = 0
    parts: Mapping[str, int] | None = None
    error: str = ""
    is_job_error: bool = False
    seconds: float = 0.0
    num_blocks: int = 0


@dataclass(frozen=True, kw_only=True)
class CandidateChecker:
    """A checker that replays candidates and caches the results.

    `ready` is the job prepared for replays, with a model on fake tensors. `original` is the user's job. `split_errors`
    has, by the sizes of cp and ep, the error of a wrong split, or "" if the split is correct.
    """

    ready: PreparedJob
    original: PreparedJob
    replays: dict[str, CheckedCandidate] = field(default_factory=dict)
    split_errors: dict[tuple[int, int], str] = field(default_factory=dict)

    @cached_property
    def depth_extrapolation(self) -> DepthExtrapolation:
        """The replays of the job, extrapolated from fewer blocks where possible."""
        return DepthExtrapolation(self.ready.job, self.ready.settings)

    def replay(self, estimate: Estimate, forecast: CostModel) -> CheckedCandidate:
        """Return the replay of the estimate's candidate on a device of the forecast's cluster."""
        name = f"{estimate.candidate} {estimate.stages}"
        if name not in self.replays:
            self.replays[name] = self._run_replay(
                estimate.candidate, estimate.stages, forecast, estimate.measured_time is not None
            )
        return self.replays[name]

    def refusal_reason(self, candidate: Candidate, forecast: CostModel) -> str:
        """Replay a candidate, and return the reason why it is refused, or an empty string."""
        return self._run_replay(candidate, (), forecast, False).error

    def is_split_error(self, candidate: Candidate, error: str) -> bool:
        """Return whether the error means that the model is split wrongly by cp and ep, whatever else the layout has."""
        return bool(error) and self.split_errors.get((candidate.cp, candidate.ep)) == error

    def count_replayed_blocks(self, candidate: Candidate, stage_blocks: tuple[int, ...], forecast: CostModel) -> int:
        """Return how many blocks the candidate's replay runs: the sum over stages, times the microbatches."""
        plan = shorten_plan(make_candidate_plan(candidate, forecast.profile, forecast.cluster.device.kind))
        blocks = _blocks_per_stage(candidate, stage_blocks, forecast.profile)
        return (
            plan.num_micro
            // plan.replicas
            * max(1, self.depth_extrapolation.count_replayed_blocks(self.ready.settings, plan, blocks))
        )

    def _run_replay(
        self, candidate: Candidate, stage_blocks: tuple[int, ...], forecast: CostModel, was_timed: bool
    ) -> CheckedCandidate:
        start_time, profile = time.monotonic(), forecast.profile
        try:
            if not was_timed:
                self._check_split_model(candidate, profile)
            plan = make_candidate_plan(candidate, profile, forecast.cluster.device.kind)
            settings = set_stages(self.ready.settings, stage_blocks)
            blocks = _blocks_per_stage(candidate, stage_blocks, profile)
            stages = self.depth_extrapolation.replay(settings, plan, blocks)
        except DataError:
            raise
        except PacelineError as error:
            return CheckedCandidate(layout=candidate.layout, error=error.what)
        except Exception as error:  # an error in the job's own code: the plan continues without this layout
            if is_out_of_memory(error):
                raise
            return CheckedCandidate(layout=candidate.layout, error=one_line_message(error), is_job_error=True)
        fullest: StageMemory = max(stages, key=lambda stage: stage.peak.total)
        return CheckedCandidate(
            layout=candidate.layout,
            peak_bytes=fullest.peak.total,
            parts=fullest.peak.as_json(),
            seconds=time.monotonic() - start_time,
            num_blocks=self.count_replayed_blocks(candidate, stage_blocks, forecast),
        )

    def _check_split_model(self, candidate: Candidate, profile: ModelProfile) -> None:
        """Check that the model split by cp and ep computes the same as the whole model.

        Raises:
            LayoutError: the split model computes a different result.
        """
        key = (candidate.cp, candidate.ep)
        if key == (1, 1):
            return
        if key not in self.split_errors:
            self.split_errors[key] = ""
            try:
                check_split_model(self.original, cp=candidate.cp, ep=candidate.ep, elements=profile.parameters)
            except LayoutError as error:
                self.split_errors[key] = error.what
        if self.split_errors[key]:
            raise LayoutError(self.split_errors[key])


def apply_replay(row: PlanRow, replays: Mapping[str, CheckedCandidate], device: Device) -> PlanRow:
    """Return the row with replayed instead of forecast memory, or with the reason for a refusal.

    Return the row itself if its candidate was not replayed.
    """
    replay = replays.get(str(row.estimate.candidate))
    if replay is None:
        return row
    if replay.error:
        return replace(row, refused=replay.error)
    replayed_bytes = {name: float(value) for name, value in (replay.parts or {}).items() if name in MEMORY_PARTS}
    memory = Memory(**replayed_bytes, reserve=device.reserve_bytes, host_bytes=row.estimate.memory.host_bytes)
    estimate = replace(
        row.estimate,
        memory=memory,
        margin_bytes=bytes_margin(memory, device, is_replayed=True),
        limit_bytes=device.memory_bytes,
    )
    return replace(row, estimate=estimate, replayed=True)


def make_candidate_plan(candidate: Candidate, profile: ModelProfile, device: str) -> ExecutionPlan:
    """Return the execution plan of a run with this candidate."""
    return make_execution_plan(
        layout=candidate.layout_spec,
        update=parse_update("sync"),
        resources=Resources(ranks=candidate.ranks, device=device),
        facts=JobFacts(global_batch_size=profile.global_batch_size, micro_batch_size=candidate.micro_batch_size),
    )


def _blocks_per_stage(candidate: Candidate, stage_blocks: tuple[int, ...], profile: ModelProfile) -> tuple[int, ...]:
    """Return the number of blocks of each stage: `stage_blocks`, or an equal split if that is empty."""
    stages = candidate.pp * candidate.virtual
    quotient, remainder = divmod(len(profile.blocks), stages)
    return stage_blocks or tuple(quotient + (stage < remainder) for stage in range(stages))


def set_stages(settings: Settings, stages: tuple[int, ...]) -> Settings:
    """Return the settings with these numbers of blocks in the stages. If they are equal, no setting is needed."""
    return settings if len(set(stages)) < 2 else replace(settings, place=replace(settings.place, stages=stages))
