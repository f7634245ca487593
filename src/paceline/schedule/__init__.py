"""Build, read, check, simulate and draw pipeline schedules. They are data, and need no torch."""

from paceline.schedule.action_walk import Costs
from paceline.schedule.lowering import forward_only, lower
from paceline.schedule.program import Action, Message, Op, Program
from paceline.schedule.program_check import check
from paceline.schedule.program_simulation import simulate
from paceline.schedule.program_svg import draw
from paceline.schedule.registry import SCHEDULES, Schedule, build
from paceline.schedule.schedule_error import ScheduleError
from paceline.schedule.text_format import parse, read, write
from paceline.schedule.text_timeline import draw_text
from paceline.schedule.timeline import Span, Timeline

__all__ = [
    "SCHEDULES",
    "Action",
    "Costs",
    "Message",
    "Op",
    "Program",
    "Schedule",
    "ScheduleError",
    "Span",
    "Timeline",
    "build",
    "check",
    "draw",
    "draw_text",
    "forward_only",
    "lower",
    "parse",
    "read",
    "simulate",
    "write",
]  # fmt: skip
