"""The picture of a schedule agrees with its timeline."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from paceline.schedule import SCHEDULES, Costs, build, draw, draw_text, forward_only, simulate

SVG = "{http://www.w3.org/2000/svg}"


def texts(picture: str) -> list[str]:
    return [node.text or "" for node in ElementTree.fromstring(picture).iter(f"{SVG}text")]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "micro"), [(1, 1), (4, 8), (8, 32)])
def test_every_compute_is_drawn_with_its_letter_and_within_the_frame(name: str, ranks: int, micro: int) -> None:
    timeline = simulate(build(name, ranks=ranks, micro=micro))
    picture = draw(timeline)
    root = ElementTree.fromstring(picture)
    boxes = [node for node in root.iter(f"{SVG}rect") if node.find(f"{SVG}title") is not None]
    assert len(boxes) == len(timeline.compute_spans)
    wide, high = (float(n) for n in root.attrib["viewBox"].split()[2:])
    drawn = [[float(b.attrib[k]) for k in ("x", "y", "width", "height")] for b in boxes]
    assert all(x >= 0 and x + w <= wide and y + h <= high for x, y, w, h in drawn)
    rows: dict[float, list[tuple[float, float]]] = {}
    for x, y, w, _ in drawn:
        rows.setdefault(y, []).append((x, x + w))
    for row in rows.values():
        row.sort()
        assert all(a[1] <= b[0] + 0.2 for a, b in pairwise(row)), "cells overlap"
    said = texts(picture)
    assert any(f"bubble {timeline.bubble:.1%}" in text for text in said)
    letters = sum(re.fullmatch(r"[FBIW]\d*", text) is not None for text in said)
    assert letters >= sum(w >= 9 for _, _, w, _ in drawn)
    assert name == "naive" or all(w >= 9 for _, _, w, _ in drawn), "only what is mostly idle may lack letters"
    assert "http" not in picture.replace("http://www.w3.org/2000/svg", "")


def test_a_measured_timeline_lies_under_the_planned_one_on_the_same_axis() -> None:
    planned = simulate(
        build("1f1b", ranks=2, micro=4), costs=Costs(forward=0.02, backward_input=0.02, backward_weight=0.02)
    )
    slower = tuple(replace(s, start=7 + 1.5 * s.start, stop=7 + 1.5 * s.stop) for s in planned.spans)
    measured = replace(planned, name="measured", spans=slower)
    picture = draw(planned, measured=measured, unit="s")
    root = ElementTree.fromstring(picture)
    groups = root.findall(f"{SVG}g")
    ends = [
        max(
            float(r.attrib["x"]) + float(r.attrib["width"]) - 58
            for r in g.iter(f"{SVG}rect")
            if r.find(f"{SVG}title") is not None
        )
        for g in groups[:2]
    ]
    assert ends[1] / ends[0] == pytest.approx(1.5, rel=0.01)
    assert sum("bubble" in text for text in texts(picture)) == 2
    assert any(text.endswith(" s") for text in texts(picture))


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_pictures_of_the_docs_are_what_is_drawn(name: str) -> None:
    kept = Path(__file__).parents[2] / "docs" / "pictures" / f"schedule-{name}.svg"
    assert kept.read_text() == draw(simulate(build(name, ranks=4, micro=8))), "python docs/pictures/draw_schedules.py"


def test_names_are_escaped() -> None:
    timeline = replace(simulate(build("1f1b", ranks=1, micro=1)), name='<a href="x">&')
    ElementTree.fromstring(draw(timeline))


def test_the_text_is_the_timeline() -> None:
    assert draw_text(simulate(build("1f1b", ranks=2, micro=2))).splitlines() == [
        "rank 0   F0 F1 .  .  B0--- .  B1---",
        "rank 1   .  F0 B0--- F1 B1---",
        "",
        "1f1b: bubble 33.3%",
    ]
    assert draw_text(simulate(forward_only(rank_of_stage=(0, 1, 1, 0), micro=1))).splitlines()[:2] == [
        "rank 0   F0.0 .    .    F3.0",
        "rank 1   .    F1.0 F2.0",
    ]


def test_a_long_text_is_cut_into_panels_of_the_asked_width() -> None:
    text = draw_text(simulate(build("zbv", ranks=4, micro=16)), width=80)
    assert max(map(len, text.splitlines())) <= 80
    words = re.findall(r"[FIW]\d\.\d+", text)
    assert len(words) == len(set(words)) == 3 * 8 * 16
