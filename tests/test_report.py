"""The table and the page say what the cards say, keep labels apart, escape what they are given, need nothing else."""

import io
import json
import random
import re
import sys
from html.parser import HTMLParser
from itertools import combinations

import pytest
from invented import eight_cards, invented_card
from rich.console import Console

from smallbert.cli import progress
from smallbert.errors import UserError
from smallbert.measuring.budget import Budget
from smallbert.measuring.card import MACHINERY_CHECK
from smallbert.measuring.shelf import load_cards, save_card
from smallbert.report import format_rows, render_table, write_report
from smallbert.report.figure import COLOURS
from smallbert.report.plot import NARROW, WIDE, Box, Point, draw, place_labels, to_svg
from smallbert.report.table import in_one_line

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """What a test wants to know of a page: its ids, its text by element, and that every element is closed."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.open, self.texts, self.attributes = [], [], {}, []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.attributes += [(tag, *pair) for pair in attributes]
        self.ids += [value for name, value in attributes if name == "id"]
        if tag not in VOID:
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_startendtag(self, tag, attributes):
        self.attributes += [(tag, *pair) for pair in attributes]
        self.ids += [value for name, value in attributes if name == "id"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        for tag in set(self.open):
            self.texts[tag][-1] += data


def read(path):
    return Page(path.read_text(encoding="utf-8"))


def printed(cards):
    text = io.StringIO()
    Console(width=160, file=text).print(render_table(cards))
    return text.getvalue()


def test_rows_hold_the_numbers_and_compare_with_the_baseline():
    rows = format_rows(eight_cards())
    assert rows[0]["versus"] == "baseline" and rows[0]["smaller"] == "1.0x"
    assert rows[3] == {
        "model": "finetune | drop_layers(3) | distill | quantize(8)",
        "score": "77.8 ± 0.9",
        "versus": "-1.8",
        "megabytes": "17.6",
        "smaller": "5.2x",
        "ms": "4.9",
        "faster": "1.6x",
        "parameters": "4.4 M",
        "status": "ok",
    }
    against_last = format_rows(eight_cards(), baseline=eight_cards()[-1])
    assert against_last[-1]["versus"] == "baseline" and against_last[0]["versus"] == "+0.3"


def test_seeds_become_one_row_and_lost_runs_stay_in_sight():
    cards = [invented_card("a", score, seed=seed) for seed, score in enumerate((80.0, 81.0, 82.0))]
    cards += [invented_card("b", 79.0, seed=0), invented_card("b", 50.0, seed=1, status="diverged", why="chance level")]
    cards += [invented_card("c", None, None, None, status="failed", why="out of memory")]
    first, second, third = format_rows(cards)
    assert (first["score"], first["seeds"], first["status"]) == ("81.0 ± 1.0", "3", "3 of 3 ok")
    assert (second["score"], second["seeds"], second["status"]) == ("79.0 ± 0.7", "1 of 2", "1 of 2 ok, 1 diverged")
    assert (third["score"], third["megabytes"], third["status"]) == ("-", "-", "failed")


def test_the_table_prints_every_model_and_leaves_brackets_alone():
    text = printed([*eight_cards(), invented_card("drop_layers(keep=[0, 5])", 70)])
    assert "drop_layers([0, 5])" in text and "79.6 ± 0.9" in text and text.count(" ok") == 9


def test_two_tasks_have_two_baselines():
    rows = format_rows(
        [*eight_cards(), invented_card("finetune", 60, task="rte"), invented_card("x | y", 55, 9, task="rte")]
    )
    assert [row["versus"] for row in rows if row["task"] == "rte"] == ["baseline", "-5.0"]


@pytest.mark.parametrize("seed", range(6))
def test_labels_keep_clear_of_each_other_and_of_points(seed):
    chance = random.Random(seed)
    anchors = [(chance.uniform(60, 620), chance.uniform(60, 380)) for _ in range(5)]
    anchors += [(anchors[0][0] + chance.uniform(-6, 6), anchors[0][1] + chance.uniform(-9, 9)) for _ in range(3)]
    sizes = [(chance.uniform(40, 150), chance.choice((12, 24))) for _ in anchors]
    frame = Box(40, 40, 740, 440)
    boxes = place_labels(anchors, sizes, [], frame)
    assert sum(one.overlap(other) for one, other in combinations(boxes, 2)) == 0
    dots = [Box(x - 3, y - 3, x + 3, y + 3) for x, y in anchors]
    assert sum(box.overlap(dot) for box in boxes for dot in dots) == 0
    assert all(frame.left <= box.left and box.right <= frame.right for box in boxes)
    assert all(abs(box.right - box.left - wide) < 1e-6 for box, (wide, _) in zip(boxes, sizes, strict=True))


@pytest.mark.parametrize("font", [None, "DejaVu Sans"])  # the first that is there; the widest, which always is
@pytest.mark.parametrize("inches", [WIDE, NARROW])
def test_the_labels_of_eight_models_do_not_overlap_when_drawn(inches, font, monkeypatch):
    if font is not None:
        monkeypatch.setattr("smallbert.report.plot.font_name", lambda: font)
    names = [row["model"] for row in format_rows(eight_cards())]
    cards = zip(names, eight_cards(), strict=True)
    points = [Point(n, c["bytes"]["total"] / 1e6, c["scores"]["accuracy"]["value"], 0.9, True) for n, c in cards]
    figure = draw(points, "MB", "accuracy", inches, limit=(25.0, "budget 25 MB"))
    renderer = figure.canvas.get_renderer()
    labels = [text for text in figure.axes[0].texts if text.get_text() not in ("MB", "accuracy")]
    assert len(labels) == 9
    boxes = [Box(*label.get_window_extent(renderer).extents) for label in labels]
    assert [a.overlap(b) for a, b in combinations(boxes, 2) if a.overlap(b) > 1] == []
    assert all(0 <= box.left and box.right <= figure.bbox.x1 for box in boxes)


def test_a_wide_span_of_sizes_is_drawn_on_a_logarithmic_axis():
    def scale(largest):
        return draw([Point("a", 10, 80, 1), Point("b", largest, 90, 1)], "MB", "accuracy").axes[0].get_xscale()

    assert (scale(41), scale(39)) == ("log", "linear")
    assert draw([Point("only", 10, 80, 0)], "MB", "accuracy").axes[0].get_xscale() == "linear"


def test_the_svg_takes_its_colours_and_font_from_the_page():
    points = [Point("a $x$ <b>&", 10, 80, 1, True, True), Point("b", 20, 90, 1, True)]
    svg = to_svg(draw(points, "MB", "accuracy"), points, "one", "a & b")
    assert not [colour for colour in COLOURS.values() if colour in svg] and "var(--accent)" in svg
    assert "font-family: var(--sans)" in svg or "px var(--sans)" in svg
    assert "Liberation" not in svg and "DejaVu" not in svg
    assert "<title>a $x$ &lt;b&gt;&amp;: 80.0 ± 1.0</title>" in svg and 'aria-label="a &amp; b"' in svg
    assert all(name.startswith("one-") for name in re.findall(r'id="([^"]+)"', svg))


def test_the_page_answers_shows_and_needs_nothing_else(tmp_path):
    path = write_report(eight_cards(), tmp_path, "Which is best?", Budget.parse("size<=25MB"))
    page, text = read(path), path.read_text(encoding="utf-8")
    assert page.texts["h1"] == ["Which is best?"]
    assert (
        "finetune | quantize(8) is the best within size ≤ 25 MB: accuracy 79.5 ± 0.9 at 23.1 MB" in page.texts["p"][1]
    )
    assert len(page.texts["tr"]) == 9 and len(page.texts["svg"]) == 4 and len(page.texts["details"]) == 8
    assert len(page.ids) == len(set(page.ids)) > 0
    assert not [one for one in page.attributes if one[1] in ("src", "srcset") or one[0] in ("link", "iframe", "object")]
    hrefs = [value for _, name, value in page.attributes if name in ("href", "xlink:href")]
    assert all(value.startswith("#") and value[1:] in page.ids for value in hrefs)
    addresses = set(re.findall(r"https?://[^\s\"'<)]+", text))
    assert all(address.startswith("http://www.w3.org/") for address in addresses), "only names of XML formats"
    assert "@import" not in text and not re.findall(r"url\((?!#)", text)
    assert "prefers-color-scheme: dark" in text and "@media print" in text
    assert json.loads((tmp_path / "cards.json").read_text()) == eight_cards()
    assert (tmp_path / "plot.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert {file.name for file in tmp_path.iterdir()} == {"index.html", "plot.png", "cards.json"}


def test_the_same_cards_give_the_same_page(tmp_path):
    one, two = (write_report(eight_cards(), tmp_path / name, "Same") for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()


def test_what_cards_say_is_escaped(tmp_path):
    evil = "<script>alert('&')</script>"
    cards = [invented_card(evil, 80, 20), invented_card("b", 70, 10, status="diverged", why=evil, command=evil)]
    text = write_report(cards, tmp_path, evil).read_text(encoding="utf-8")
    assert "<script>alert" not in text and text.count("<script>") == 1
    assert "&lt;script&gt;alert(" in text


def test_lost_runs_and_missing_numbers_are_told(tmp_path):
    cards = [invented_card("a", 80, 20), invented_card("b", 79, 10, None)]
    cards += [invented_card("b | c", 50, 5, seed=seed, status="diverged", why="one class only") for seed in (0, 1)]
    page = read(write_report(cards, tmp_path, "Lost"))
    assert any("0 of 2 ok, 2 diverged" in row for row in page.texts["tr"])
    notes = " ".join(page.texts["p"])
    assert "b | c: one class only." in notes and "No ms for b: not asked." in notes
    assert "Not drawn: 1 of 3 models" in page.texts["figcaption"][0]
    assert "Not drawn: 2 of 3 models" in page.texts["figcaption"][1]


@pytest.mark.parametrize(("width", "has_left"), [(80, False), (120, True)])
def test_names_and_numbers_stay_whole_on_a_narrow_terminal(width, has_left, capsys, monkeypatch):
    monkeypatch.setattr(progress, "make_console", lambda: Console(file=sys.stdout, width=width))
    cards = eight_cards()
    cards[2] |= {"status": "diverged", "why": "no better than guessing"}
    cards[5]["parameters"] = {**cards[5]["parameters"], "encoder": 1000, "encoder_non_zero": 300}
    for place, card in enumerate(cards):
        card |= {"preset": f"{place} layers, int8 arithmetic"}
        card["scores"]["accuracy"] |= {"value": 100.0}
        card["latency"] |= {"p50_ms": 0.1234}
    progress.Progress().show(render_table(cards))
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert max(map(len, lines)) <= width and sum("100.0 ± 0.9" in line and "0.123" in line for line in lines) == 8
    assert shown.count("arithmetic") == 8 and shown.count("diverged") == 1
    assert (("% left" in shown) is has_left) and (("30.0 / " in shown) is has_left)


def test_a_run_in_one_line():
    card = invented_card("quantize(bits=4)", 79.6, 23.1, seed=3)
    assert in_one_line(card) == "quantize(4): accuracy 79.6 ± 0.7 at 23.1 MB"
    lost = {**card, "status": "diverged", "why": "x"}
    assert in_one_line(lost, with_seed=True) == "quantize(4), seed 3: diverged, accuracy 79.6 ± 0.7 at 23.1 MB"
    failed = invented_card("quantize(bits=4)", None, None, status="failed", why="x")
    assert in_one_line(failed) == "quantize(4): failed"


def test_a_baseline_larger_than_the_files_it_was_made_from_is_told(tmp_path):
    told = "x smaller counts from finetune as it was saved here, 133 MB; the files of e5-small, which it was made from"
    facts = {"model": "e5-small", "model_bytes": 67_700_000}
    cards = [invented_card("finetune", 90, 133, **facts), invented_card("finetune | quantize(bits=8)", 90, 34, **facts)]
    assert f"{told}, take 67.7 MB" in " ".join(printed(cards).split())
    assert f"{told}, take 67.7 MB." in read(write_report(cards, tmp_path, "Half")).texts["p"]
    assert "counts from" not in printed([{**card, "model_bytes": 130_000_000} for card in cards])
    assert "counts from" not in printed([{**card, "model_bytes": None} for card in cards])
    assert "counts from" not in printed(cards[:1])
    larger = [cards[0] | {"model_bytes": 130_000_000}, cards[1] | {"model_bytes": 20_000_000}]
    assert "counts from" not in printed(larger)  # only the baseline is what the others are counted from


def test_tasks_get_a_section_each_and_machinery_checks_a_warning(tmp_path):
    cards = [*eight_cards(), invented_card("finetune", 60, task="rte", task_note="277 examples.")]
    page = read(write_report(cards, tmp_path / "two", "Two"))
    assert len(page.texts["section"]) == 2 and "277 examples." in page.texts["section"][1]
    assert (tmp_path / "two" / "plot1.png").exists()
    tiny = [invented_card(kind=MACHINERY_CHECK)]
    assert "Machinery check" in read(write_report(tiny, tmp_path / "tiny", "Tiny")).texts["p"][0]
    with pytest.raises(UserError, match="cannot be in one report"):
        write_report([*cards, *tiny], tmp_path / "mixed", "Mixed")
    assert not (tmp_path / "mixed").exists()


def test_a_report_lies_beside_its_cards_and_no_cards_are_an_error(tmp_path):
    for card in eight_cards():
        save_card(card, tmp_path)
    write_report(load_cards(tmp_path), tmp_path, "Beside")
    assert len(load_cards(tmp_path)) == 8
    with pytest.raises(UserError, match="there are no cards to report on"):
        write_report([], tmp_path / "none", "None")
