"""Draw every schedule at 4 ranks and 8 microbatches: python docs/pictures/draw_schedules.py"""

from pathlib import Path

from paceline.schedule import SCHEDULES, build, draw, simulate

for name in SCHEDULES:
    picture = draw(simulate(build(name, ranks=4, micro=8)))
    Path(__file__).with_name(f"schedule-{name}.svg").write_text(picture)
