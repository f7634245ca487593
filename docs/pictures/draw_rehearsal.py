"""Draw a pipeline whose third rank takes half as long again: python docs/pictures/draw_rehearsal.py"""

from pathlib import Path

from paceline.planner.simulation.event_simulator import SlowRank, simulate_step
from paceline.schedule import Costs, build, draw

costs = Costs(forward=1.0, backward=2.0, transfer=0.1)
found = simulate_step(build("1f1b", ranks=4, micro=8), costs=costs, slow_ranks=[SlowRank(rank=2, factor=1.5)])
Path(__file__).with_name("rehearsal.svg").write_text(draw(found.timeline, unit="s"))
