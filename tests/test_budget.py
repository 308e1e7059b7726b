"""Budgets read limits with units, answer typing mistakes, and choose the best card within them."""

import numpy as np
import pytest
from invented import eight_cards, invented_card

from smallbert.errors import UserError
from smallbert.measuring.budget import Budget, best, frontier
from smallbert.measuring.card import number
from smallbert.measuring.groups import given_name, group_cards, pick_baseline, score_of, short_names, status_of
from smallbert.measuring.outcomes import is_clearly_better, pack, unpack
from smallbert.recipes.recipe import Recipe
from smallbert.report.table import make_rows


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("size<=25MB latency<=5ms accuracy>=90", "size<=25MB latency<=5ms accuracy>=90"),
        ("size <= 25 MB, accuracy >= 0.905", "size<=25MB accuracy>=90.5"),
        ("size≤16MiB latency<0.5s", "size<=16.8MB latency<500ms"),
        ("bytes<=500kB score>80 params<=10M", "size<=0.5MB score>80 parameters<=10M"),
        ("f1>=90% latency<=250us;macs<=1.5G", "f1>=90 latency<=0.25ms macs<=1,500M"),
        ("parameters<=10 accuracy>=90", "parameters<=1e-05M accuracy>=90"),
    ],
)
def test_limits_are_read_with_their_units(text, read):
    assert str(Budget.parse(text)) == read


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("sise<=25MB", "Did you mean 'size'?"),
        ("acuracy>=90", "Did you mean 'accuracy'?"),
        ("size<=25", "has no unit; write one of: size<=25B, size<=25kB, size<=25MB"),
        ("size<=25 latency<=5ms", "size<=25 has no unit"),
        ("size<=25XB", "has an unknown unit"),
        ("accuracy>=90ms", "a score has no unit 'ms'"),
        ("size=25MB", "cannot read 'size=25MB'"),
        ("size<=25MB small", "cannot read 'small'"),
        ("  ", "the budget is empty"),
    ],
)
def test_mistakes_are_answered(text, answer):
    with pytest.raises(UserError) as error:
        Budget.parse(text)
    assert answer in str(error.value)


def test_other_metrics_can_be_named():
    assert Budget.parse("accuracy_mm>=80", metrics=["accuracy_mm"]).limits[0].value == 80


def test_a_card_fits_or_is_told_why_not():
    budget, card = (
        Budget.parse("size<=25MB latency<=5ms accuracy>=80"),
        invented_card(score=79.0, megabytes=30.2, ms=5.0),
    )
    assert budget.why_not(card) == ["its size of 30.2 MB is over 25 MB", "its accuracy of 79 is under 80"]
    assert not budget.fits(card) and budget.fits(invented_card(score=80.0, megabytes=25.0, ms=5.0))
    assert budget.why_not(invented_card(score=80, megabytes=1, ms=None)) == ["its latency was not measured (not asked)"]


def test_the_best_score_within_the_budget_wins():
    cards = [invented_card("a", 90, 90), invented_card("b", 85, 20), invented_card("c", 80, 10)]
    choice = best(cards, Budget.parse("size<=25MB"))
    assert choice.card["recipe"] == "b"
    assert choice.sentence == "b is the best within size ≤ 25 MB: accuracy 85.0 ± 0.7 at 20 MB and 8 ms."
    assert best(cards).card["recipe"] == "a" and "is the best of 3" in best(cards).sentence


def test_a_tie_within_one_standard_error_goes_to_the_smaller():
    cards = [invented_card("a", 90.0, 90, stderr=0.7), invented_card("b", 89.4, 20), invented_card("c", 89.2, 10)]
    choice = best(cards)
    assert choice.card["recipe"] == "b"
    assert "a has 90.0, which is within one standard error (0.7), and b is smaller" in choice.sentence


def marks(right, n=2000):
    """A card's score and right answers, where the examples of these numbers are right."""
    share = 100 * len(right) / n
    score = {"value": share, "stderr": 0.7, "n": n, "low": share - 1.4, "high": share + 1.4}
    return {"scores": {"accuracy": score}, "right": pack([place in right for place in range(n)])}


def test_a_lead_inside_the_noise_is_told():
    """By McNemar's test where it is known what each gets right: the same lead may be noise or not."""
    first = set(range(1800))
    noise, sure = first - set(range(60)) | set(range(1800, 1842)), first - set(range(18))  # both 0.9 behind
    one, two = invented_card("a", 90, 20, 8.0, **marks(first)), invented_card("b", 89, 10, 8.1, **marks(noise))
    known = "no worse as far as 2,000 dev examples can tell"
    alone = "a is the best of 2: accuracy 90.0 ± 0.7 at 20 MB and 8 ms"
    assert best([one, two]).sentence == f"{alone}; b (accuracy 89.1 ± 0.7 at 10 MB and 8.1 ms) is {known}, and smaller."
    assert best([one, invented_card("c", 89, 10, 2, **marks(sure))]).sentence == f"{alone}."
    slow = invented_card("d", 89, 19, 9, **marks(noise))
    assert best([one, slow]).sentence == f"{alone}; d has 89.1, {known}, but neither plainly smaller nor faster."
    near = invented_card("e", 89, 10, 2, **marks(first - set(range(12))))  # within a standard error, and surely worse
    assert best([one, near]).card["recipe"] == "a"
    told = "e (accuracy 89.4 ± 0.7 at 10 MB and 2 ms) is behind by more than chance, but smaller and faster"
    assert best([one, near]).sentence == f"{alone}; {told}."
    far = invented_card("f", 85, 5, 1, **marks(first - set(range(100))))
    assert best([one, near, far, two]).sentence == f"a is the best of 4{alone[18:]}; {told}."  # the best of those


def test_unsteady_seeds_are_no_reason_to_look_at_a_model():
    first = set(range(1800))
    steady = [invented_card("good", 90, 90, seed=seed, **marks(first)) for seed in range(3)]
    lost = [
        invented_card("wild", 80, 20, 2, seed=seed, **marks(set(range(1790 - 590 * (seed == 1))))) for seed in range(3)
    ]
    assert best(steady + lost).sentence == "good is the best of 2: accuracy 90.0 ± 0.0 at 90 MB and 8 ms."
    close = [invented_card("near", 90, 20, 2, seed=seed, **marks(first - {seed})) for seed in range(3)]
    choice = best([*close, invented_card("good", 90, 90, **marks(first))])
    assert choice.card["recipe"] == "near"  # 0.05 behind and smaller
    big = [invented_card("big", 90, 19.8, 9, seed=seed, **marks(first - {seed, 7})) for seed in range(3)]
    told = "no worse as far as 2,000 dev examples and 3 seeds can tell, but neither plainly smaller nor faster."
    assert best(close + big).sentence.endswith(told)


@pytest.mark.parametrize(
    ("top", "other", "told"),
    [
        ((90, 103.5, 1.0), (89.9, 101.0, 4.0), ", and b is smaller"),
        ((90, 100, None), (89.9, 100, 8), None),  # nothing is known to be faster
        ((90, 100, 8), (90, 101, 8), None),
        ((90, 103, 8), (89.9, 100, 4), ", and b is smaller and faster"),
    ],
)
def test_smaller_and_faster_are_said_where_they_are(top, other, told):
    cards = [invented_card(name, *facts) for name, facts in (("b", other), ("a", top))]
    choice = best(cards)
    assert choice.card["recipe"] == ("b" if told else "a" if other[0] == 90 else "b")
    assert (told in choice.sentence) if told else " and b is" not in choice.sentence


@pytest.mark.parametrize("seeds", [(1, 3), (3, 1), (3, 3), (2, 5)])
def test_the_test_over_seeds_is_welchs_with_the_error_of_the_examples(seeds):
    """Against the same sum of variances put together here, with scipy's distribution."""
    from scipy import stats

    random = np.random.default_rng(sum(seeds) + seeds[0])
    for spread in (2, 6, 12):
        rights = [
            [set(random.choice(400, 300 + int(shift + random.normal(0, spread)), replace=False)) for _ in range(count)]
            for count, shift in zip(seeds, (30, 0), strict=True)
        ]
        rows = [
            group_cards([invented_card(name, seed=seed, **marks(one, 400)) for seed, one in enumerate(of)])[0]
            for name, of in zip("ab", rights, strict=True)
        ]
        bits = [np.array([[place in one for place in range(400)] for one in of]) for of in rights]
        gap, apart = 100 * (bits[0].mean() - bits[1].mean()), 100 * (bits[0].mean(0) - bits[1].mean(0))
        spreads = [np.std(100 * of.mean(1), ddof=1) if len(of) > 1 else None for of in bits]
        spreads = [next(s for s in spreads[::-1] if s is not None) if s is None else s for s in spreads]
        degrees = [(len(of) if len(of) > 1 else max(seeds)) - 1 for of in bits]
        parts = [s**2 / len(of) for s, of in zip(spreads, bits, strict=True)]
        whole = sum(parts) + apart.var(ddof=1) / 400
        freedom = whole**2 / sum(part**2 / free for part, free in zip(parts, degrees, strict=True))
        p = 2 * stats.t.sf(abs(gap) / whole**0.5, min(int(freedom), 10_000))
        assert is_clearly_better(*rows) == (gap > 0 and p < 0.05)


def test_cards_of_other_examples_are_not_paired():
    first = set(range(1800))
    near = marks(first - set(range(12)))
    one, other = invented_card("a", 90, 20, **marks(first)), invented_card("b", 89, 20, **near)
    assert is_clearly_better(*group_cards([one, other]))
    for fact in ({"split": "test"}, {"task_fingerprint": "0" * 16}):
        assert not is_clearly_better(*group_cards([one, {**other, **fact}]))


def test_without_right_answers_a_lead_beyond_one_standard_error_is_one():
    cards = [invented_card("a", 90.0, 20), invented_card("b", 89.5, 30, 4.0), invented_card("c", 89.0, 10)]
    told = "; b (accuracy 89.5 ± 0.7 at 30 MB and 4 ms) is within one standard error, and faster."
    assert best(cards).sentence.endswith(told)
    untimed = invented_card("b", 89.5, 30, None)
    told = "; b has 89.5, within one standard error, but not plainly smaller."
    assert best([cards[0], untimed]).sentence.endswith(told)


def test_means_over_seeds_are_compared_on_examples_and_seeds():
    first = set(range(1800))

    def row(recipe, *rights):
        return group_cards([invented_card(recipe, seed=seed, **marks(right)) for seed, right in enumerate(rights)])[0]

    steady = row("a", first, first, first)
    worse = row("b", *[first - set(range(place, place + 30)) for place in (0, 5, 10)])
    assert is_clearly_better(steady, worse) and not is_clearly_better(worse, steady)
    unsteady = row("c", first, first - set(range(60)), first - set(range(30)))  # seeds alone could do that
    assert unsteady["scores"]["accuracy"]["value"] == worse["scores"]["accuracy"]["value"]
    assert not is_clearly_better(steady, unsteady) and not is_clearly_better(steady, steady)
    assert is_clearly_better(row("d", set(range(2000)), set(range(2000))), row("e", set(), set()))


def test_right_answers_are_kept_as_they_are():
    right = [False, False, True, True, False, True, False, False, True]
    assert unpack(pack(right)).tolist() == right and unpack(pack([])).size == 0 and len(pack([True] * 40_000)) < 100


def test_when_none_fits_the_nearest_is_named_with_what_it_exceeds():
    cards = [invented_card("a", 90, 90), invented_card("b", 85, 30), invented_card("c", 80, None)]
    choice = best(cards, Budget.parse("size<=25MB"))
    assert choice.card is None
    assert (
        "No model is within size ≤ 25 MB; the nearest is b (accuracy 85.0 ± 0.7 at 30 MB and 8 ms)" in choice.sentence
    )
    assert choice.sentence.endswith("but its size of 30 MB is over 25 MB.")


def test_runs_that_did_not_go_well_are_never_best():
    diverged = invented_card("a", 99, 1, status="diverged", why="loss was NaN")
    assert best([diverged, invented_card("b", 60, 50)]).card["recipe"] == "b"
    assert best([diverged]).card is None and "a: diverged" in best([diverged]).sentence
    assert best([]).card is None


def test_tasks_are_not_ranked_together():
    with pytest.raises(UserError, match="several tasks"):
        best([invented_card(), invented_card(task="sst2")])


def test_the_frontier_is_what_nothing_beats():
    cards = [
        invented_card("a", 90, 90),
        invented_card("b", 85, 95),
        invented_card("c", 85, 20),
        invented_card("d", 70, 20),
    ]
    cards += [
        invented_card("e", 99, 1, status="diverged", why="x"),
        invented_card("f", None, 5, headline="f1", status="failed", why="x"),
    ]
    assert [card["recipe"] for card in frontier(cards)] == ["c", "a"]
    assert [card["recipe"] for card in frontier(cards, "parameters")] == ["c", "a"]


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
