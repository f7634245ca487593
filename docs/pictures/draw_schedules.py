"""Draw every schedule at 4 ranks and 8 microbatches: python docs/pictures/draw_schedules.py"""

from pathlib import Path

from paceline.schedule import SCHEDULES, Costs, Program, build, draw, simulate
from paceline.schedule.weight_version_rules import Rule, VersionRule, build_continuous_program

programs: dict[str, Program] = {name: build(name, ranks=4, micro=8) for name in SCHEDULES}
programs["pipedream"] = build_continuous_program(VersionRule(stages=4, rule=Rule.NEWEST), sizes=[1] * 9)
programs["2bw"] = build_continuous_program(VersionRule(stages=4, rule=Rule.DOUBLE), sizes=[4] * 3)
for name, program in programs.items():
    costs = Costs(update=0.25 if program.update_microbatches else 0.0)
    Path(__file__).with_name(f"schedule-{name}.svg").write_text(draw(simulate(program, costs=costs)))
