"""What every method promises, checked for every method and every family: a new method is tested without a line here."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from toys import batch_of, is_same_state, pairs, run, scores_of, small, snapshot, state_of, stream_of, toy_task

from smallbert.errors import UserError
from smallbert.methods import METHODS
from smallbert.model import folders
from smallbert.model.encoder import fingerprint
from smallbert.model.folders import load_folder, save_folder
from smallbert.recipes.recipe import Recipe
from smallbert.tiny import SHAPES

SHORT = "train(epochs=1, batch=8, lr=0.001)"
TASK = toy_task("pair", 16)
TEXT = str(Path(__file__).parent / "data" / "own" / "text.txt")
RECIPES = {  # a method without a row is used as it stands
    "align": f"finetune(epochs=1, batch=8) | align('relations') + align('hidden', transform='linear') + {SHORT}",
    "lstm": "lstm(6, inner=5, embed=7)",
    "bottleneck": "bottleneck(layers=2, width=24, inner=8, heads=2, ffns=2, ffn=16, embed=8)",
    "add_vocabulary": "add_vocabulary(60)",
    "augment": f"mark('here') | augment(copies=2, ways=['nearest', 'grams']) + distill('here') + {SHORT}",
    "cut_to_mixture": "mix_layers | cut_to_mixture(0.6)",
    "distill": f"finetune(epochs=1, batch=8) | distill + {SHORT}",
    "codebook_aware": f"codebook_aware(2) + {SHORT}",
    "drop_layers": "drop_layers(2)",
    "finetune": "finetune(epochs=1, batch=8, lr=0.001)",
    "l0": f"l0(pull=0.001, lr=3.0, start=0.0) + {SHORT}",
    "lottery": f"lottery(0.5, rounds=2, part={SHORT})",
    "magnitude": f"magnitude(0.5) + {SHORT}",
    "mark": "mark('here')",
    "mixed_bits": "mixed_bits(2.5, batches=2, examples=4, rounds=4)",
    "movement": f"movement(0.5) + {SHORT}",
    "pretrain": f"pretrain({TEXT!r}, epochs=2, lr=0.001, batch=4, length=16)",
    "prune": "prune(0.5)",
    "quantize_aware": f"quantize_aware(4, activations=False) + {SHORT}",
    "rpp": f"rpp(pull=10.0, steps=1) + {SHORT}",
    "second_order": f"second_order(0.5, events=2, gradients=8, block=8, examples=2, damp=1e-4) + {SHORT}",
    "smooth_movement": f"smooth_movement(0.5, window=1) + {SHORT}",
    "soft_movement": f"soft_movement(pull=0.001, lr=3.0, begin=0.0) + {SHORT}",
    "share_projections": f"finetune(epochs=1, batch=8) | drop_layers(2) | share_projections + {SHORT}",
    "small_vocabulary": "small_vocabulary(60)",
    "student": "student([0, 2], heads=2, ffn=20, start='slice')",
    "sparse": "prune(0.5) | sparse",
    "repeat": "repeat(2, drop_layers(0.6))",
    "unlabelled": f"mark('here') | unlabelled + distill('here', alpha=1.0) + {SHORT}",
    "watch": f"watch(2) + {SHORT}",
    "rewind": f"mark('here') | {SHORT} | rewind('here')",
}
CHANGES_NO_WEIGHT = {"mark"}
ALIKE = {"train", "repeat", "mark", "head"}  # leave behind what others leave too: fine-tuned, cut, or plain
ALIKE |= {"movement", "soft_movement", "l0", "smooth_movement", "second_order", "rpp", "lottery"}  # as magnitude does
ALIKE |= {"quantize_aware", "ternary", "binary", "mixed_bits"}  # as quantize does
ALIKE |= {"codebook_aware"}  # as codebook does
OTHER_MODEL = {"lstm", "bottleneck"}  # put a model of another family in place of the encoder's
ALIKE |= {"pretrain", "unlabelled", "augment"}  # as fine-tuning does
EXPAND = {"repeat", "lottery"}  # stand for other methods, whose names the history has
CHAINS = [
    "mix_layers | drop_layers(2)",
    f"mix_layers(norm='layer') | {SHORT} | drop_layers(2) | drop_layers(1, which='last')",
    f"finetune(epochs=1, batch=8) | magnitude(0.5) + distill + {SHORT} | quantize(8)",
    f"finetune(epochs=1, batch=8) | drop_layers(2) | align('attention') + align('gram') + distill + {SHORT}",
    "quantize | finetune(epochs=1, batch=8)",
    f"magnitude(0.5) + {SHORT} | finetune(epochs=1, batch=8)",
    f"magnitude(0.5) + {SHORT} | drop_layers(2) | {SHORT}",
    f"drop_layers(2) | mix_layers | magnitude(0.3) + distill + {SHORT} | drop_layers(1) | quantize(activations=True)",
    f"mix_layers(layers=[0, 2], layer_dropout=0.5, gradual=0.5) + {SHORT} | drop_layers(1, which='first')",
    f"mix_layers(layers=[-1]) + {SHORT} | cut_to_mixture",
    f"gate_layers | {SHORT} | drop_layers(2)",
    f"gate_layers(squeeze='square') | connect_layers | {SHORT} | drop_layers(2, which='last') | quantize",
    f"connect_layers(dilation=2, period=2) | mix_layers | magnitude(0.5) + {SHORT} | drop_layers(2)",
    "head(pool='mean') | mix_layers(init='plain') | finetune(epochs=1, batch=8) | quantize",
    f"mix_layers | prune(0.3) | sparse(run='sparse') | drop_layers(2) | {SHORT} | quantize",
    "finetune(epochs=1, batch=8) | pool_layers + train(epochs=1, batch=8, freeze='backbone') | drop_layers(2)",
    f"pool_layers('attention', layers=[0, 2]) + {SHORT} | cut_to_mixture | drop_layers(1)",
    f"pool_layers(detach=True, tokens='mean') + {SHORT} | drop_layers(2) | {SHORT} | quantize",
    f"pool_layers('mix', beside=True, norm='feature') + magnitude(0.5) + {SHORT} | cut_to_mixture(0.6)",
    f"add_vocabulary(60) | pretrain(epochs=1, batch=8, lr=0.001) | small_vocabulary | {SHORT}",
    "add_vocabulary(60) | pretrain(epochs=1, batch=8) | drop_layers(2) | finetune(epochs=1, batch=8) | quantize",
    f"finetune(epochs=1, batch=8) | trim_vocabulary | drop_layers(2) | distill + {SHORT} | quantize",
    f"pool_layers(masked=False) | {SHORT} | pool_layers('attention', masked=False, detach=True) + {SHORT}",
    f"finetune(epochs=1, batch=8) | mix_layers | magnitude(0.5) + quantize_aware + distill + {SHORT} | drop_layers(2)",
    f"quantize(3, scope='group', group=5, feedback=True) | {SHORT} | drop_layers(2)",
    f"drop_layers(2) + ternary(embeddings=8) + {SHORT} | finetune(epochs=1, batch=8)",
    f"mix_layers | magnitude(0.5) + codebook_aware(3) + {SHORT} | drop_layers(2)",
    "gate_layers | codebook(3, embeddings=4) | finetune(epochs=1, batch=8) | drop_layers(2)",
    "quantize(8, activations='static', smooth=0.5) | drop_layers(2)",
    "quantize(8, activations='static', smooth='search') | drop_layers(2)",
]


REFUSED = {(RECIPES["student"], "mobilebert")}  # a bottleneck has other sizes than a width


def recipe_of(method: str) -> str:
    return RECIPES.get(method, method)


@cache
def base_of(family: str):
    """A tiny encoder that already has a head for the toy task."""
    return run("head", small(family, layers=3), TASK, seed=5).encoder


@cache
def made(recipe: str, family: str, seed: int = 0):
    """What a recipe makes of the tiny encoder of a family, or the sentence with which it refuses."""
    try:
        return run(recipe, base_of(family), TASK, seed)
    except UserError as refusal:
        return str(refusal)


def result_or_refusal(recipe: str, family: str):
    outcome = made(recipe, family)
    if isinstance(outcome, str):  # a clear refusal is as good as working, where one is expected
        assert (recipe, family) in REFUSED, outcome
        assert len(outcome) > 20 and "\n" not in outcome and "Traceback" not in outcome
        pytest.skip(f"refused: {outcome}")
    return outcome.encoder


KIN = ["bert", "albert", "modernbert"]
some_families = pytest.mark.parametrize("kin", KIN)


# The quick part has every method in every fifth family, and those that leave behind what others leave too in one; of
# the square of all methods each after itself, after every eighteenth other one and before every eighteenth other one;
# of the chains each in one family. The rest runs with -m slow.
FIRSTS = [name for name in METHODS if name not in ALIKE]
EVERY = pairs(FIRSTS, SHAPES, every=5) + pairs(sorted(ALIKE), SHAPES, every=len(SHAPES))
every_method = pytest.mark.parametrize(("method", "family"), EVERY, scope="session")
SQUARE = pairs(FIRSTS, METHODS, every=18, also=lambda first, method: first == method)
CHAINED = pairs(CHAINS, KIN, every=len(KIN))


@every_method
def test_given_encoder_is_untouched_and_the_same_seed_gives_the_same_again(method, family):
    given = base_of(family).copy().train()  # whatever mode it is in, it stays in it
    before = snapshot(given)
    torch.manual_seed(12345)  # what the caller draws is no part of it
    try:
        again = run(recipe_of(method), given, TASK).encoder
    except UserError:
        again = None
    assert snapshot(given) == before
    result = result_or_refusal(recipe_of(method), family)
    assert again is not None and is_same_state(result, again) and result.history == again.history
    mine = {parameter.data_ptr() for parameter in given.parameters()}
    assert not mine & {parameter.data_ptr() for parameter in again.parameters()}
    assert not any(module.training for module in again.modules())


@every_method
def test_something_changed(method, family):
    result, base = result_or_refusal(recipe_of(method), family), base_of(family)
    assert len(result.history) > len(base.history)
    assert result.history[: len(base.history)] == base.history
    # A family that shares its layers changes in how often it runs them, not in its weights.
    changed = not is_same_state(result, base) or not torch.equal(scores_of(result, TASK), scores_of(base, TASK))
    assert changed == (method not in CHANGES_NO_WEIGHT)
    assert any(entry["step"].startswith(method) for entry in result.history) or method in EXPAND


@every_method
def test_same_interface_and_finite(method, family):
    result, base = result_or_refusal(recipe_of(method), family), base_of(family)
    scores = scores_of(result, TASK)
    assert scores.shape == scores_of(base, TASK).shape and torch.isfinite(scores).all()
    assert not torch.equal(scores[0], scores[1])  # it still looks at the text
    assert (result.family, result.width) == (family, base.width) or method in OTHER_MODEL
    assert result.head.labels == base.head.labels
    states = result.states(batch_of(result, TASK))
    assert len(states.hidden) == len(result.order) + 1
    assert all(torch.isfinite(hidden).all() for hidden in states.hidden)


@every_method
def test_text_survives_printing_and_plan_is_json(method, family):
    recipe = Recipe(recipe_of(method))
    assert Recipe(str(recipe)) == recipe and str(Recipe(str(recipe))) == str(recipe)
    assert json.loads(json.dumps([m.settings() for phase in recipe for m in phase], allow_nan=False))
    result = result_or_refusal(recipe_of(method), family)
    assert json.loads(json.dumps(result.history, allow_nan=False)) == result.history
    for entry in result.history:
        ((again,),) = Recipe(entry["step"])
        assert str(again) == entry["step"]


@every_method
def test_saved_and_loaded_is_equal_to_the_bit(method, family, tmp_path):
    result = result_or_refusal(recipe_of(method), family)
    before = snapshot(result)
    save_folder(result, tmp_path / "model")
    assert snapshot(result) == before
    check_equal(load_folder(tmp_path / "model"), result)


@pytest.mark.parametrize(("method", "kin"), pairs(METHODS, KIN, every=len(KIN)))
def test_saved_and_loaded_under_our_own_names(method, kin, tmp_path, monkeypatch):
    result = result_or_refusal(recipe_of(method), kin)
    monkeypatch.setattr(folders, "_write_hugging_face", lambda encoder, folder: False)
    assert save_folder(result, tmp_path / "model") == "smallbert"
    check_equal(load_folder(tmp_path / "model"), result)


def check_equal(loaded, result):
    """A loaded encoder is the one that was saved: weights, scores in both layouts, what was done, what it knows."""
    assert is_same_state(loaded, result) and loaded.history == result.history and loaded.order == result.order
    assert torch.equal(scores_of(loaded, TASK), scores_of(result, TASK))
    if result.packable:
        assert torch.equal(scores_of(loaded, TASK, packed=True), scores_of(result, TASK, packed=True))
    assert fingerprint(loaded) == fingerprint(result) and loaded.source == result.source
    held = [[name for name, _ in encoder.held("zeros")] for encoder in (loaded, result)]
    assert held[0] == held[1]
    rates = [[getattr(module, "own_rate", None) for module in encoder.modules()] for encoder in (loaded, result)]
    assert rates[0] == rates[1]
    dropouts = [[m.p for m in encoder.modules() if isinstance(m, torch.nn.Dropout)] for encoder in (loaded, result)]
    assert dropouts[0] == dropouts[1]
    assert (
        stream_of(loaded, TASK).views["student"].ids.tolist() == stream_of(result, TASK).views["student"].ids.tolist()
    )


@every_method
def test_company_padding_and_packing_do_not_matter(method, family):
    check_company(result_or_refusal(recipe_of(method), family))


@torch.no_grad()
def check_company(encoder):
    """A text gets the same scores alone, among others, padded further, and packed, up to float noise."""
    together = scores_of(encoder, TASK)
    for number in range(5):
        torch.testing.assert_close(scores_of(encoder, TASK, index=[number])[0], together[number], atol=2e-5, rtol=1e-4)
    others = scores_of(encoder, TASK, index=[4, 6, 0, 7], slots=7)  # other company, in other places, empty rows behind
    torch.testing.assert_close(others[[0, 2]], together[[4, 0]], atol=2e-5, rtol=1e-4)
    if encoder.packable:
        packed = scores_of(encoder, TASK, packed=True, slots=6)
        torch.testing.assert_close(packed[:5], together, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("first", "method"), SQUARE)
def test_works_after_every_other_method(first, method, tmp_path, monkeypatch):
    before = result_or_refusal(recipe_of(first), "distilbert")
    try:
        result = run(recipe_of(method), before, TASK).encoder
    except UserError as refusal:
        pytest.skip(f"refused: {refusal}")
    assert torch.isfinite(scores_of(result, TASK)).all()
    assert result.history[: len(before.history)] == before.history
    monkeypatch.setattr(folders, "_write_hugging_face", lambda encoder, folder: False)  # the quicker layout
    save_folder(result, tmp_path / "model")
    check_equal(load_folder(tmp_path / "model"), result)


@pytest.mark.parametrize(("chain", "kin"), CHAINED)
def test_chains(chain, kin, tmp_path):
    outcome = made(chain, kin)
    assert not isinstance(outcome, str), outcome
    result = outcome.encoder
    assert torch.isfinite(scores_of(result, TASK)).all()
    for name in ("model", "again"):  # once more from what was loaded
        save_folder(result, tmp_path / name)
        loaded = load_folder(tmp_path / name)
        check_equal(loaded, result)
        result = loaded
    if not any(getattr(module, "activations", False) for module in result.modules()):  # float noise moves a whole step
        check_company(result)
    assert is_same_state(run(chain, base_of(kin), TASK).encoder, result)


@some_families
def test_a_mixture_loses_the_layers_that_are_dropped(kin):
    whole, cut = made("mix_layers", kin).encoder, made("mix_layers | drop_layers(2)", kin).encoder
    assert len(whole.mixture.weights) == 4 and len(cut.mixture.weights) == 3
    kept = cut.history[-1]["plan"]["layers"]
    assert torch.equal(cut.mixture.weights, whole.mixture.weights[[0, *(place + 1 for place in kept)]])


@some_families
@pytest.mark.parametrize("after", ["finetune(epochs=2, batch=8)", "drop_layers(2)", f"drop_layers(2) | {SHORT}"])
def test_zeros_are_held_through_what_comes_after(kin, after):
    sparse = made(f"magnitude(0.5) + {SHORT}", kin).encoder
    zeros = {name: tensor == 0 for name, tensor in state_of(sparse).items() if "backbone" in name and tensor.dim() == 2}
    assert sum(int(mask.sum()) for mask in zeros.values()) > 500
    later = run(after, sparse, TASK).encoder
    assert {id(module) for _, module in later.held("zeros")}
    modules = dict(later.held("zeros"))
    total = sum(module.weight.numel() for module in modules.values())
    left = sum(int(module.weight.count_nonzero()) for module in modules.values())
    assert left == pytest.approx(total / 2, rel=0.01)
    if "drop_layers" not in after:
        weights = state_of(later)
        for name in (f"{name}.weight" for name in modules):
            assert torch.equal(weights[name] == 0, zeros[name])
        assert not is_same_state(later, sparse)


def test_the_quick_part_has_every_method_in_many_families_and_on_both_sides_of_others():
    every, square, chained = ([p.values for p in params if not p.marks] for params in (EVERY, SQUARE, CHAINED))
    assert all(sum(name == method for name, _ in every) >= (1 if method in ALIKE else 2) for method in METHODS)
    for side, names in enumerate((FIRSTS, METHODS)):
        assert all(sum(pair[side] == name != pair[1 - side] for pair in square) >= 2 - side for name in names)
    assert {chain for chain, _ in chained} == set(CHAINS)


def test_every_family_has_a_shape_and_every_method_a_sentence(family):
    assert family in SHAPES and all(method.about for method in METHODS.values())
