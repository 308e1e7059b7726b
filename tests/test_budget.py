"""Budgets read limits with units, answer typing mistakes, and say what a card breaks."""

import pytest
from invented import invented_card

from smallbert.errors import UserError
from smallbert.measuring.budget import Budget


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
        ("accuracy>=101", "no accuracy is above 100"),
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
