"""A card is complete or refused, has one file per piece of work, and never holds NaN."""

import json
import math
import subprocess
import sys

import pytest
from invented import invented_card

from smallbert.errors import RunError, UserError
from smallbert.machine.facts import machine, versions
from smallbert.measuring.budget import Budget
from smallbert.measuring.card import FIELDS, MACHINERY_CHECK, card_key, check_card, make_card, number
from smallbert.measuring.shelf import (
    card_path,
    keep_budget,
    kept_budget,
    load_card,
    load_cards,
    load_pack,
    pack_cards,
    save_card,
)
from smallbert.recipes.recipe import Recipe

WHOLE = Recipe("finetune").key()


def test_a_card_says_its_recipe_as_today_s_would(tmp_path):
    """A setting that came later has its default; where things were kept is not said; what cannot be read stays."""
    said = "augment(copies=2, folder='here') + train(epochs=1.0)", "gone_since(keep=3)"
    for seed, recipe in enumerate(said):
        save_card({**invented_card(), "recipe": recipe, "seed": seed}, tmp_path)
    found = {card["seed"]: card["recipe"] for card in load_cards(tmp_path)}
    assert found == {0: str(Recipe("augment(copies=2) + train(epochs=1)")), 1: said[1]}


def test_saving_and_loading_gives_the_same_card_in_the_order_of_the_schema(tmp_path):
    card = {**invented_card(), "recipe": WHOLE}
    path = save_card(dict(reversed(card.items())), tmp_path)
    assert load_cards(tmp_path) == [card]
    assert list(json.loads(path.read_text())) == list(FIELDS)
    before = path.read_bytes()
    assert save_card(load_card(path), tmp_path) == path and path.read_bytes() == before


def test_the_same_work_has_the_same_file_and_other_work_another():
    card = invented_card(
        "finetune(epochs=3, teacher='x') | repeat(3, drop_layers(keep=3)) + distill | quantize(bits=8)"
    )
    key = card_key(**card)
    assert key.startswith("rotten_tomatoes-finetune-repeat-drop_layers-distill-quantize-s0-")
    assert card_key(**{**card, "preset": "named", "seconds": 1.0, "command": "other"}) == key
    changes = {"recipe": "finetune", "seed": 1, "task": "sst2", "task_fingerprint": "0", "model_fingerprint": "0"}
    keys = {card_key(**{**card, name: value}) for name, value in changes.items()}
    assert len({*keys, key, card_key(**{**card, "kind": MACHINERY_CHECK})}) == len(changes) + 2
    assert card_path("cards", key).name == f"{key}.json"
    assert "/" not in card_key(**{**card, "task": "/some where/reviews.csv"})


def test_a_card_says_all_it_lacks():
    card = invented_card()
    del card["seed"], card["latency"]["p95_ms"]
    with pytest.raises(RunError, match=r"seed is not there; latency\.p95_ms is not there"):
        check_card(card)
    with pytest.raises(RunError, match="status is diverged, but why gives no reason"):
        invented_card(status="diverged")
    with pytest.raises(RunError, match="headline 'mcc' is not among the scores"):
        invented_card(headline="mcc")
    with pytest.raises(RunError, match=r"status is 'fine'"):
        invented_card(status="fine", why="x")
    with pytest.raises(RunError, match=r"scores\.accuracy\.n is not there"):
        invented_card(scores={"accuracy": {"value": 1.0, "stderr": 1.0, "low": 0.0, "high": 2.0}})
    with pytest.raises(RunError, match="a card has no field colour"):
        invented_card(colour="red")
    with pytest.raises(RunError, match="recipe is None"):
        make_card(model="x")


def test_a_null_needs_a_reason():
    with pytest.raises(RunError, match="throughput is null without a reason"):
        invented_card(missing={})
    assert invented_card(ms=None)["missing"]["latency"] == "not asked"
    failed = invented_card(status="failed", why="the disk was full", scores=None, bytes=None, missing={})
    assert failed["scores"] is None


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_becomes_null_with_a_reason(tmp_path, value):
    macs = {"value": value, "length": 32}
    card = invented_card(macs=macs)
    assert card["macs"]["value"] is None and "came out as" in card["missing"]["macs.value"]
    card["macs"]["value"] = value
    with pytest.raises(RunError, match=r"macs\.value is not a finite number"):
        save_card(card, tmp_path)
    assert not list(tmp_path.iterdir())


def test_numbers_are_kept_to_six_digits_and_scalars_of_numpy_are_taken():
    numpy = pytest.importorskip("numpy")
    card = invented_card(seconds=numpy.float32(1 / 3), chance=200 / 3)
    assert card["seconds"] == 0.333333 and card["chance"] == 66.6667
    json.dumps(card)


def test_machinery_checks_stay_apart_and_copies_count_once(tmp_path):
    save_card(invented_card(seed=0), tmp_path / "a")
    save_card(invented_card(seed=0), tmp_path / "b")
    save_card(invented_card(seed=1, kind=MACHINERY_CHECK), tmp_path)
    assert [card["seed"] for card in load_cards(tmp_path)] == [0]
    assert [card["seed"] for card in load_cards(tmp_path, (MACHINERY_CHECK,))] == [1]


def test_other_json_files_are_passed_over_and_damaged_cards_are_named(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    (tmp_path / "cards.json").write_text("[]")
    assert load_cards(tmp_path) == []
    with pytest.raises(UserError, match=r"cards\.json cannot be read as a card: it holds no names and values"):
        load_card(tmp_path / "cards.json")
    (tmp_path / "cut.json").write_text('{"card": 1, "kind"')
    with pytest.raises(UserError, match=r"cut\.json cannot be read as a card"):
        load_cards(tmp_path)
    (tmp_path / "cut.json").write_text(json.dumps(invented_card()).replace("57.8", "NaN"))
    with pytest.raises(UserError, match="NaN is not a number in JSON"):
        load_cards(tmp_path)
    with pytest.raises(UserError, match="there is no folder of cards"):
        load_cards(tmp_path / "nowhere")


def test_numbers_by_name():
    card = invented_card(score=81.5, megabytes=20, ms=2.5)
    assert [number(card, name) for name in ("score", "f1", "size", "latency")] == [81.5, 79.5, 20e6, 2.5]
    assert number(card, "throughput") is None and number(card, "mcc") is None


def test_a_card_says_what_part_of_a_gpu_its_run_had(monkeypatch):
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "25")
    assert "gpu_per_cent" not in machine()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda place: "a GPU")
    assert machine()["gpu"] == "a GPU" and machine()["gpu_per_cent"] == 25.0


def test_machine_and_versions_say_no_host_name_and_nothing_heavy_is_imported():
    import platform

    assert set(machine()) == {"system", "cpu", "cores", "memory_gb", "gpu"} and machine()["cores"] >= 1
    assert versions()["python"] == platform.python_version()
    code = """
import sys, smallbert.measuring.budget, smallbert.measuring.card, smallbert.report, smallbert.sources
smallbert.measuring.card.machine(), smallbert.measuring.card.versions()
print([name for name in ("torch", "matplotlib", "jinja2", "huggingface_hub", "numpy", "rich") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_many_cards_fit_into_one_file(tmp_path):
    cards = [{**invented_card(), "recipe": WHOLE, "seed": seed} for seed in (3, 1, 2)]
    for card in cards[:2]:
        save_card(card, tmp_path / "cards")
    path = pack_cards(tmp_path)
    assert path.name == "cards.jsonl" and not (tmp_path / "cards").exists()
    assert len(path.read_text(encoding="utf-8").splitlines()) == 2
    save_card(cards[2], tmp_path / "cards")
    assert pack_cards(tmp_path) == path  # what is there already stays
    assert {card["seed"] for card in load_cards(tmp_path)} == {1, 2, 3}
    assert load_pack(path)[card_key(**cards[0])] == load_cards(tmp_path)[0] | {"seed": 3}
    assert pack_cards(tmp_path / "nothing") and not (tmp_path / "nothing").exists()
    path.write_text(path.read_text(encoding="utf-8") + "{}\n", encoding="utf-8")
    with pytest.raises(UserError, match="line 4"):
        load_cards(tmp_path)


def test_a_folder_keeps_the_budget_of_its_latest_comparison(tmp_path):
    assert kept_budget(tmp_path) is None
    budget = Budget.parse("size<=16.777MiB f1>=0.905")  # to the byte, though 17.6 MB is what is shown
    keep_budget(tmp_path, budget)
    assert kept_budget(tmp_path) == budget and load_cards(tmp_path) == []
    keep_budget(tmp_path, None)
    assert kept_budget(tmp_path) is None
    for text in ('{"budget": 3}', "[1]", "no JSON"):  # another program's
        (tmp_path / "compare.json").write_text(text)
        keep_budget(tmp_path, budget)
        assert kept_budget(tmp_path) is None and (tmp_path / "compare.json").read_text() == text
    (tmp_path / "compare.json").write_text('{"compare": 1, "budget": 3}')
    with pytest.raises(UserError, match="delete it"):
        kept_budget(tmp_path)
