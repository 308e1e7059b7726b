"""Cards taken together: seeds in one row, names that tell rows apart, what the others are compared with."""

from invented import eight_cards, invented_card

from smallbert.measuring.card import number
from smallbert.measuring.choice import best
from smallbert.measuring.groups import given_name, group_cards, pick_baseline, score_of, short_names, status_of
from smallbert.recipes.recipe import Recipe
from smallbert.report.table import make_rows


def test_seeds_are_taken_together_and_lost_runs_are_counted():
    cards = [invented_card("a", score, 90, seed=seed) for seed, score in enumerate((80.0, 82.0, 84.0))]
    cards += [
        invented_card("b", 81.0, 50, seed=0),
        invented_card("b", 50.0, 50, seed=1, status="diverged", why="chance"),
    ]
    first, second = group_cards(cards)
    assert score_of(first) == (82.0, 2.0) and first["runs"]["seeds"] == [0, 1, 2] and status_of(first) == "3 of 3 ok"
    assert (
        score_of(second) == (81.0, 0.7) and status_of(second) == "1 of 2 ok, 1 diverged" and second["why"] == "chance"
    )
    assert group_cards([first, second]) == [first, second]
    assert group_cards([*cards, cards[0]]) == [first, second], "the same run twice counts once"
    sentence = best(cards).sentence
    assert sentence.startswith("b is the best of 2") and "1 of 2 ok, 1 diverged" in sentence
    assert number(first, "size") == 90e6


def test_a_row_knows_what_its_good_seeds_get_right():
    fields = [{"seed": 0, "right": "b"}, {"seed": 1, "status": "diverged", "why": "chance", "right": "a"}]
    (row,) = group_cards([invented_card("a", 80.0, 50, **some) for some in fields])
    assert row["right"] == ["b"]


def test_names_show_only_what_tells_rows_apart():
    assert short_names(eight_cards())[:4] == [
        "baseline",
        "finetune | quantize(8)",
        "finetune | drop_layers(3) | distill",
        "finetune | drop_layers(3) | distill | quantize(8)",
    ]
    differing = [invented_card(f"finetune(epochs={epochs}, lr=1e-05)") for epochs in (1, 2)]
    assert short_names(differing) == ["finetune(epochs=1)", "finetune(epochs=2)"]
    same = [invented_card("finetune", model=model, preset="p") for model in ("small", "large")]
    assert short_names(same) == ["small: p: finetune", "large: p: finetune"]
    assert short_names([invented_card("not ( a recipe")]) == ["not ( a recipe"]


def test_one_row_alone_has_the_settings_that_were_given():
    given = 'quantize(4, scope="group", symmetric=False)'
    one, other = (invented_card(str(Recipe(text))) for text in (given, "finetune | quantize"))
    assert [row.cells["model"] for row in make_rows([one])] == [given]
    assert [row.cells["model"] for row in make_rows([other])] == ["finetune | quantize"]
    assert make_rows([]) == []
    assert given_name({**one, "preset": "p"}) == "p" and given_name(invented_card("not ( a recipe")) == "not ( a recipe"


def test_the_baseline_is_what_least_was_done_to():
    cards = [invented_card("finetune | quantize(bits=8)", 80, 20), invented_card("drop_layers(keep=1)", 70, 50)]
    assert pick_baseline([*cards, invented_card("finetune", 90, 90)])["recipe"] == "finetune"
    assert pick_baseline(eight_cards())["preset"] == "baseline"
    assert pick_baseline([]) is None
    small = invented_card("finetune", 70, 20)  # is no yardstick for what is larger, whatever became of that
    assert pick_baseline([small, invented_card("finetune | quantize(bits=8)", 80, 60)]) is None
    assert pick_baseline([small, {**invented_card("head | finetune", 50, 70), "status": "diverged"}]) is None
    assert pick_baseline([small, invented_card("finetune | mix_layers", 80, 20.5)]) == small
    given = invented_card("identity", 88, 45)  # in half precision, and all that is trained from it is not
    assert pick_baseline([invented_card("finetune", 90, 90), given]) == given
    other = invented_card("finetune", 90, 90, model="larger", model_fingerprint="0" * 16)  # not made of that one
    assert pick_baseline([other, given]) == other
