"""Pipeline schedules as data, without torch: build, read, check, simulate and draw them."""

from paceline.schedule.build import build
from paceline.schedule.program import Action, Message, Op, Program

__all__ = ["Action", "Message", "Op", "Program", "build"]
