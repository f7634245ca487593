"""Build, read, check, simulate and draw pipeline schedules. They are data, and need no torch.

Start with `program.py`.

- `action_walk.py`: Run a program in virtual time: each rank runs its actions in order, and waits for messages and for
  `Costs.ready`.
- `closed_forms.py`: Compute step times with the closed forms of the papers, for equal stages and messages that take no
  time.
- `dependencies.py`: Check one rank's actions, without the other ranks: none is missing or extra, and each comes after
  its inputs.
- `lowering.py`: Lower compute orders to a program, by adding sends and receives.
- `program.py`: A pipeline schedule as data: the ordered actions of each rank, shared by the runtime, the planner and
  the drawings.
- `program_check.py`: Check that a program is complete, that each action comes after its inputs, and that there is no
  deadlock.
- `program_simulation.py`: Check a program, then simulate it in virtual time.
- `program_svg.py`: Draw timelines as one self-contained SVG.
- `registry.py`: Find and build schedules by name.
- `schedule_error.py`: The error for a program with a fault.
- `schedules.py`: Build the compute orders of the built-in schedules: each function returns one order per rank, without
  messages.
- `text_format.py`: Read and write schedules as text, for custom schedules and for inspecting any program.
- `text_timeline.py`: Draw timelines as text, for terminals and errors, with one line per rank and one column per tick.
- `timeline.py`: Timelines of simulated and measured programs: when each rank ran its actions.
- `weight_version_rules.py`: Determine by a rule which weight version each microbatch uses, in pipelines that are never
  flushed.
"""

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
