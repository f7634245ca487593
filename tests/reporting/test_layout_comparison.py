"""The page and the table of `compare JOB --layouts`, from plain numbers."""

import re
from html.parser import HTMLParser

import pytest

from paceline.reporting.layout_comparison import MeasuredLayout, comparison_page, comparison_rows, comparison_text
from paceline.reporting.svg.bar_chart import BarRow, draw_bars

HELD = {"parameters": 4 << 20, "gradients": 4 << 20, "optimizer": 8 << 20, "buffers": 0, "activations": 16 << 20}


def losses(shift: float = 0.0) -> list[tuple[float, float]]:
    return [(float(step), 4.0 / step + shift * step) for step in range(1, 9)]


def sharded(parts: dict[str, int]) -> dict[str, int]:
    return {kind: value // (1 if kind == "activations" else 4) for kind, value in parts.items()}


def found() -> list[MeasuredLayout]:
    ring = {"all_reduce": float(6 << 20)}
    stage = [HELD | {"activations": (20 - 4 * rank) << 20} for rank in range(4)]
    return [
        MeasuredLayout(
            name="single", ranks=1, verdict="bitwise", step_seconds=1.25, samples_per_second=51.2,
            tokens_per_second=13107.2, memory_by_rank=[HELD], sent_by_rank=[{}], losses=losses(),
        ),
        MeasuredLayout(
            name="ddp", ranks=4, verdict="bitwise", step_seconds=0.41, samples_per_second=156.1,
            tokens_per_second=39960.0, memory_by_rank=[HELD] * 4, sent_by_rank=[ring] * 4, losses=losses(),
        ),
        MeasuredLayout(
            name="fsdp", ranks=4, verdict="rounding", step_seconds=0.475, samples_per_second=134.0,
            tokens_per_second=34304.0, memory_by_rank=[sharded(HELD)] * 4, losses=losses(1e-7),
            sent_by_rank=[{"all_gather": float(6 << 20), "reduce_scatter": float(3 << 20), "all_reduce": 512.0}] * 4,
        ),
        MeasuredLayout(
            name="pp=4,schedule=1f1b", ranks=4, verdict="rounding", step_seconds=0.5, samples_per_second=128.0,
            tokens_per_second=32768.0, memory_by_rank=stage, bubble=0.273, planned_bubble=0.25, losses=losses(2e-7),
            sent_by_rank=[{"send": float((2 - (rank == 3)) << 20), "receive": 0.0} for rank in range(4)],
            schedule="<svg id='schedule'></svg>",
        ),
        MeasuredLayout(name="tp=4", ranks=4, verdict="refused", reason="num_key_value_heads=2 does not divide by tp=4."),
    ]  # fmt: skip


class Tags(HTMLParser):
    """Counts what is opened and not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not any(name in ("src", "href") for name, _ in attrs)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing() -> None:
    html = comparison_page(found(), job="text")
    tags = Tags()
    tags.feed(html)
    assert tags.open == []
    assert "http" not in html and "<script" not in html
    for name in ("single", "ddp", "fsdp", "pp=4,schedule=1f1b", "tp=4", "num_key_value_heads=2"):
        assert name in html
    assert html.count("id='schedule'") == 1 and "measured bubble 27.3%; 25.0% if all" in html


def test_the_table_has_what_was_measured_and_no_empty_column() -> None:
    head, body = comparison_rows(found())
    row = dict(zip(head, body[2], strict=True))
    assert row == {
        "layout": "fsdp", "ranks": "4", "step": "475.0 ms", "samples/s": "134", "tokens/s": "34,304",
        "peak per rank": "20.0 MiB", "parameters": "1.0 MiB", "gradients": "1.0 MiB", "optimizer": "2.0 MiB",
        "activations": "16.0 MiB", "sent per step": "9.0 MiB", "bubble": "–",
        "verdict": "rounding",
    }  # fmt: skip
    assert dict(zip(head, body[3], strict=True))["peak per rank"] == "36.0 MiB"  # its fullest rank
    short, _ = comparison_rows([MeasuredLayout(name="ddp", ranks=2, step_seconds=2.0)])
    assert short == ["layout", "ranks", "step"]


def test_each_layout_keeps_its_colour() -> None:
    captions = re.findall(r'<figcaption class="legend">(.*?)</figcaption>', comparison_page(found(), job="x"))
    named = [dict(re.findall(r'box(\d)"></i>([^<]+)<', c)) for c in captions if "ddp" in c]
    assert len(named) == 2 and named[0] == named[1]


def test_reasons_are_said_under_the_table() -> None:
    assert comparison_text(found()).splitlines()[-1] == "tp=4: num_key_value_heads=2 does not divide by tp=4."


def test_a_bar_is_what_the_table_says() -> None:
    total = {**HELD, "total": sum(HELD.values())}
    html = comparison_page(
        [MeasuredLayout(name="ddp", ranks=1, memory_by_rank=[total])], job="x", verification_note="see <verify>"
    )
    assert ">32.0 MiB<" in html and "64.0 MiB" not in html and "see &lt;verify&gt;" in html


def test_bars_are_as_long_as_they_should_be() -> None:
    drawn = draw_bars(
        "held", ("a", "b"), [BarRow(name="x", parts={"a": 100, "b": 300}), BarRow(name="y", parts={"b": 200})]
    )
    widths = [float(w) for w in re.findall(r'<rect [^>]*width="([\d.]+)"', drawn)]
    assert widths == pytest.approx([widths[0], 3 * widths[0], 2 * widths[0]], abs=0.02)
    ends = [float(x) + w for x, w in zip(re.findall(r'<rect x="([\d.]+)"', drawn), widths, strict=True)]
    assert max(ends) < 860
    assert draw_bars("held", ("a",), [BarRow(name="x", parts={})]) == ""


def test_equal_ranks_share_a_bar_and_unequal_ones_do_not() -> None:
    html = comparison_page(found(), job="text")
    assert "ddp · ranks 0–3<" in html and "single · rank 0<" in html
    assert "pp=4,schedule=1f1b · rank 0<" in html and all(f">rank {rank}<" in html for rank in (1, 2, 3))
    pairs = comparison_page(
        [MeasuredLayout(name="pp=2", ranks=8, memory_by_rank=[HELD, sharded(HELD)] * 2 + [HELD] * 2)], job="x"
    )
    assert "pp=2 · ranks 0, 2, 4–5<" in pairs and ">ranks 1, 3<" in pairs


def test_many_collectives_end_in_others() -> None:
    sent = [{f"kind{n}": float(1 << (20 + n)) for n in range(9)}]
    html = comparison_page([MeasuredLayout(name="all", ranks=2, memory_by_rank=[HELD], sent_by_rank=sent)], job="x")
    assert "others" in html and "kind8" in html and "kind0" not in html


def test_names_are_escaped() -> None:
    html = comparison_page([MeasuredLayout(name="<b>", ranks=1, memory_by_rank=[HELD], reason="a < b")], job="<i>")
    assert "<b>" not in html.replace("<b>&lt;b&gt;</b>", "") and "<i>" not in html.replace("<i class", "")


def test_nothing_but_refusals_is_a_page_too() -> None:
    html = comparison_page([MeasuredLayout(name="tp=4", ranks=4, verdict="refused", reason="no")], job="x")
    assert "Memory per rank" not in html and "refused" in html
