"""Pictures of watched runs and of studies over several tasks."""

from invented import invented_card

from smallbert.measuring.findings import Result, gather, pair_up
from smallbert.report.differences import draw_differences
from smallbert.report.traces import draw_watch, write_watches


def looks(mixture=True):
    value = {"loss": 0.4, "gradients": [None, 0.1, 0.0], "spread": [0.0, 0.2, 1e-13], "accuracy": 90.0, "largest": 60.0}
    value |= {"kept": [0.5, 0.1]} | ({"mixture": [0.2, 0.3, 0.5]} if mixture else {})
    return [{"step": step, "value": value} for step in (10, 20, 30)]


def test_a_watched_run_is_drawn_with_what_was_seen():
    whole, plain = draw_watch(looks(), "a run"), draw_watch(looks(mixture=False), "another")
    assert len(whole.axes) == len(plain.axes) + 1
    titles = [axes.get_title(loc="left") for axes in whole.axes]
    assert titles[0] == "a run" and "its share in the mixture" in titles
    assert len(draw_watch(looks()[:1], "one look").axes) == len(whole.axes)
    kept = next(line for line in whole.axes[0].lines if "kept" in line.get_label())
    assert list(kept.get_ydata()) == [30.0] * 3


def test_where_no_class_is_guessed_the_loss_is_drawn():
    seen = {"gradients": [0.1, 0.0], "spread": [0.0, 0.2]}
    read = [{"step": step, "value": {"loss": loss, **seen}} for step, loss in ((10, 9.5), (20, 6.5))]
    axes = draw_watch(read, "reading").axes[0]
    (line,) = axes.lines
    assert line.get_label() == "loss" and list(line.get_ydata()) == [9.5, 6.5] and axes.get_ylim()[1] < 50


def test_the_first_run_of_each_recipe_is_drawn(tmp_path):
    def card(name, seed, watched=True):
        made = {**invented_card(), "preset": name, "seed": seed}
        return {**made, "trained": {**made["trained"], **({"traces": {"watch": looks()}} if watched else {})}}

    paths = write_watches([card("a b", 1), card("a b", 2), card("c", 1, False), card("d", 1)], tmp_path)
    assert [path.name for path in paths] == ["watch-a-b.png", "watch-d.png"] and all(p.is_file() for p in paths)


def results(arm, task, scores, status="ok"):
    return [Result(task, arm, None, seed, status, score) for seed, score in enumerate(scores)]


def test_differences_are_those_of_the_table_and_what_is_missing_is_said():
    runs = results("plain", "one", [80, 82]) + results("plain", "two", [50, 50])
    runs += results("mixed", "one", [90, 93]) + results("mixed", "two", [50, 50], "diverged")
    figure = draw_differences(pair_up(gather(runs)))
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["one", "two"]
    drawn = {line.get_marker(): list(line.get_xdata()) for line in axes.lines if len(line.get_xdata()) == 1}
    assert drawn["o"] == [10.5] and drawn["x"] == [0.0]
    assert "some diverged" in axes.get_xlabel() and axes.get_xscale() == "symlog" and "tighter" in axes.get_xlabel()
