"""Pipeline schedules as data, without torch: build, read, check, simulate and draw them."""

from paceline.schedule.build import build
from paceline.schedule.check import check
from paceline.schedule.follow import Costs
from paceline.schedule.forward import forward_only
from paceline.schedule.lower import lower
from paceline.schedule.program import Action, Message, Op, Program
from paceline.schedule.simulate import simulate
from paceline.schedule.strip import in_text
from paceline.schedule.table import SCHEDULES, Schedule
from paceline.schedule.timeline import Span, Timeline
from paceline.schedule.wrong import ScheduleError

__all__ = [
    "SCHEDULES", "Action", "Costs", "Message", "Op", "Program", "Schedule", "ScheduleError", "Span", "Timeline",
    "build", "check", "forward_only", "in_text", "lower", "simulate",
]  # fmt: skip
