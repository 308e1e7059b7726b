"""Presets of distillation from end to end: each in every family, with the sizes of its recipe cut to tiny models."""

import re
from pathlib import Path

import pytest
import torch
from toys import pairs, run, scores_of, small, toy_task

from smallbert.errors import UserError
from smallbert.model.encoder import HEAD
from smallbert.model.folders import load_folder, save_folder
from smallbert.presets import PRESETS, distillation, students
from smallbert.recipes.recipe import Recipe
from smallbert.tiny import SHAPES

NAMES = [row.name for row in (*distillation.ROWS, *students.ROWS)] + ["kd-pruned"]
ISSUED = (
    "distilbert pkd6 pkd3 pd aguilar-sid tinybert4 tinybert6 minilm minilmv2 mobilebert zhao192 zhao96 zhao48 waldorf "
    "minibert bilstm textbrewer rosita kd-pruned"
).split()
OURS = ["bilstm-trimmed", "bilstm-tiny"]
# What tiny models of 12 layers, 16 wide with 4 heads and 32 inner neurons, have in place of the papers' sizes.
TINY = {
    r"epochs=[\d.]+": "epochs=1.0",
    r"batch=\d+": "batch=16",
    r"copies=\d+": "copies=1",
    r"width=312": "width=8",
    r"width=(384|256|192|96|48)": "width=8",
    r"ffn=\d+": "ffn=20",
    r"heads=(12|48)": "heads=4",
    r"heads=6": "heads=3",
    r"bottleneck\([^)]*\)": "bottleneck(layers=5, width=24, inner=8, heads=4, ffns=2, ffn=16, embed=4)",
    r"lstm\([^)]*\)": "lstm(6, inner=5, embed=4)",
    r"size=4928": "size=60",
}
DEPTH = {"tinybert4": 4, "pkd3": 3, "minibert": 3, "waldorf": 8, "rosita": 8, "mobilebert": 5, "bilstm": 0}
DEPTH |= dict.fromkeys(OURS, 0)
DEPTH |= dict.fromkeys(("zhao192", "zhao96", "zhao48", "kd-pruned"), 12)
# A model with bottlenecks has other sizes than a width, so nothing can be cut out of it.
SLICED = {"tinybert4", "minilm", "minilmv2", "zhao192", "zhao96", "zhao48", "waldorf", "minibert", "rosita"}
REFUSED = {(name, "mobilebert"): "cannot be given another width" for name in SLICED}


def shrunk(recipe):
    """A recipe in sizes of a tiny model."""
    text = str(Recipe(recipe))
    for old, new in TINY.items():
        text = re.sub(rf"\b{old}", new, text)
    return text


def test_the_presets_are_those_that_were_asked_for():
    assert sorted(NAMES) == sorted(ISSUED + OURS)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("distilbert", "distill(alpha=0.714, temperature=2.0)"),  # 5, 2 and 1 of 8, but for the labels' share
        ("distilbert", "align('hidden', layers={-1: -1}, metric='cosine', weight=0.143)"),
        ("pkd6", "align('first', layers='skip', transform='l2', weight=100)"),
        ("pkd3", "align('first', layers='skip', transform='l2', weight=100)"),
        ("pkd6", "distill(alpha=0.5, temperature=10.0)"),
        (
            "mobilebert",
            "align('hidden', transform='linear_each', schedule='progressive', weight=100, teacher='teacher', task=0)",
        ),
        ("mobilebert", "align('relations', of='qk', heads=4, metric='kl', schedule='progressive', teacher='teacher')"),
        ("tinybert4", "align('hidden', layers='whole', transform='linear', weight=5, teacher='teacher', task=0)"),
        ("minilmv2", "align('relations', heads=48, layers={-1: -1}, metric='kl', teacher='teacher', task=0)"),
        ("textbrewer", "distill(alpha=1.0, temperature=8.0)"),
        ("bilstm", "distill(alpha=1.0, metric='mse')"),
    ],
)
def test_the_numbers_of_a_preset_are_the_papers(name, settings):
    ((wanted,),) = Recipe(settings)
    assert wanted in [method for phase in Recipe(PRESETS[name].recipe) for method in phase]


# Every preset in one family is among the quick ones; the others run with -m slow.
@pytest.mark.parametrize(("name", "family"), pairs(NAMES, SHAPES, every=len(SHAPES)))
def test_a_preset_runs_from_end_to_end(name, family, tmp_path):
    narrow = {"embedding_size": 4} if family in ("electra", "albert") else {}  # narrower than any student
    encoder, task = small(family, layers=12, **narrow), toy_task("tag" if name == "minibert" else "pair", 16)
    if reason := REFUSED.get((name, family)):
        with pytest.raises(UserError, match=reason):
            run(shrunk(name), encoder, task, judge=False)
        return
    outcome = run(shrunk(name), encoder, task, judge=False)
    made = outcome.encoder
    assert not outcome.diverged and len(made.order) == DEPTH.get(name, 6) and HEAD in made.heads
    save_folder(made, tmp_path / "model")
    assert torch.equal(scores_of(load_folder(tmp_path / "model"), task), scores_of(made, task))


# The stage that reads a corpus, as docs/distillation.md shows it.

PAGE = (Path(__file__).parent.parent / "docs" / "distillation.md").read_text(encoding="utf-8")
TEXT = str(Path(__file__).parent / "data" / "own" / "text.txt")


@pytest.mark.parametrize("recipe", re.findall(r"```recipe\n(.*?)```", PAGE, re.DOTALL), ids=range(4))
def test_recipes_of_the_page_run(recipe):
    task = toy_task("pair", 16)
    encoder = run(f"pretrain({TEXT!r}, steps=1, keep_head=True)", small(layers=12), task).encoder
    outcome = run(shrunk(recipe.replace("corpus.txt", TEXT)), encoder, task, judge=False)
    assert not outcome.diverged and len(outcome.encoder.order) in (4, 6, 12)


def test_the_page_names_every_preset():
    named = re.findall(r"`([a-z0-9-]+)`", PAGE[PAGE.index("| preset |") : PAGE.index("## A corpus first")])
    assert set(ISSUED + OURS) <= set(named)
