"""What is committed under results/ is whole, and its overview is made from it and from nothing else."""

import json
from pathlib import Path

import pytest
from invented import invented_card

from smallbert.errors import UserError
from smallbert.measuring.shelf import load_cards, save_card
from smallbert.recipes.recipe import Recipe
from smallbert.report.markdown import render_overview, write_overview

RESULTS = Path(__file__).parent.parent / "results"
PLACES = ("/root", "/dev/", "/home", "/work", "/tmp", "/mnt", "/Users", "C:")  # of one machine alone


def test_the_overview_is_current():
    assert (RESULTS / "README.md").read_text(encoding="utf-8") == render_overview(RESULTS)


def test_records_are_small_and_hold_no_weights_or_states():
    files = [path for path in RESULTS.rglob("*") if path.is_file()]
    assert files and all(path.suffix in (".md", ".json", ".jsonl", ".png", ".csv") for path in files)
    assert max(path.stat().st_size for path in files) < 2_000_000


def test_committed_cards_say_how_they_were_made():
    cards = load_cards(RESULTS)
    assert cards
    for card in cards:
        said = card["command"] + card["model"]
        assert said.startswith("smallbert ") and not any(place in said for place in PLACES)


@pytest.mark.parametrize(("preset", "arm"), [("pruned10", "10 %"), ("pruned3", "3 %")])
def test_a_preset_that_names_a_study_is_what_was_studied(preset, arm):
    """All but that the study's models keep their zeros, which `sparse` takes away without changing a weight."""
    arms = json.loads((RESULTS / "pruning" / "best" / "study.json").read_text(encoding="utf-8"))["arms"]
    (studied,) = (Recipe(one["recipe"]) for one in arms if one["name"] == arm)
    *phases, last = Recipe(preset)
    assert Recipe(phases) == studied and Recipe(last) == Recipe("sparse")
    cards = [card for card in load_cards(RESULTS / "pruning" / "best") if Recipe(card["recipe"]) == studied]
    assert len(cards) > 1


def test_an_overview_has_a_row_a_group_and_every_command(tmp_path):
    for seed in (0, 1):
        save_card({**invented_card(), "seed": seed, "command": f"smallbert x --seed {seed}"}, tmp_path / "a_topic")
    text = write_overview(tmp_path).read_text()
    assert "## a topic" in text and "smallbert x --seed 0" in text and "smallbert x --seed 1" in text


def test_a_model_of_which_no_run_learned_anything_has_a_row_without_a_score(tmp_path):
    save_card({**invented_card(), "status": "diverged", "why": "it says one class"}, tmp_path / "a_topic")
    (row,) = (line for line in render_overview(tmp_path).splitlines() if "diverged" in line)
    headings = next(line for line in render_overview(tmp_path).splitlines() if line.startswith("| task "))
    assert dict(zip(headings.split(" | "), row.split(" | "), strict=True))["scores"] == "-"


def test_rows_of_a_record_need_not_have_the_same_columns(tmp_path):
    rows = [{"store": "int8", "kB": 6}, {"store": "none", "s": 9}]
    record = {"benchmark": "a", "command": "python a.py", "rows": rows}
    record |= {name: invented_card()[name] for name in ("machine", "versions")}
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "a.json").write_text(json.dumps(record))
    text = render_overview(tmp_path)
    assert "| store | kB | s |" in text and "| int8 | 6 |  |" in text and "| none |  | 9 |" in text


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match="no cards"):
        render_overview(tmp_path)
