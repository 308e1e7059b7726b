"""What only a GPU can show: exact thresholds, fused masks, packed attention, recorded steps equal to plain ones."""

from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from toys import is_same_state, small, toy_task

from smallbert.making.run import run_recipe
from smallbert.methods import METHODS
from smallbert.model.attention import Attending
from smallbert.recipes.recipe import Recipe
from smallbert.texts.batches import Layout, make_batch
from smallbert.texts.data import STUDENT, Stream, Tokens
from smallbert.tiny import SHAPES, make_encoder
from smallbert.training import alignment
from smallbert.training.loop import train
from smallbert.training.masks import hold_zeros, maskable, prune_once
from smallbert.training.phase import Phase
from smallbert.training.precision import HALF
from smallbert.training.ranking import LOWEST, spread_out
from smallbert.training.thresholds import Hint, kth_largest

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def wide(family, width=64):
    return make_encoder(family, **{"dim" if family == "distilbert" else "hidden_size": width})


def make_stream(count=600, longest=60):
    random = np.random.default_rng(0)
    lengths = random.integers(4, longest, count)
    ids = random.integers(5, 100, lengths.sum()).astype(np.int32)
    tokens = Tokens(ids, np.zeros(len(ids), np.uint8), np.concatenate([[0], np.cumsum(lengths)]))
    return Stream({STUDENT: tokens}, random.integers(0, 2, count), "classify")


@pytest.mark.parametrize("numbers", [100, 16_384, 16_385, 147_456, 2_359_296])
def test_thresholds_are_those_of_a_full_sort(numbers):
    generator = torch.Generator("cuda").manual_seed(0)
    rows = torch.randn(9, numbers, device="cuda", generator=generator)
    rows[1] *= 1e-6
    rows[2] = rows[2].round()  # many ties
    rows[3] = 0.0
    rows[4] = rows[4].abs()
    rows[5, :: 1 + 6 * -(-(-(-numbers // 16_384) - 1) // 6)] = 50.0  # a sample that misleads
    rows[6, rows[6] < 1] = 0.0  # pruned before, to a share of 0.16
    rows[7, rows[7] < 1] = LOWEST  # the same as a learned score
    rows[8] = spread_out([rows[8][None]], "local", 1e-6)[0]  # scores at the start, one float beside the other
    for share in (1.0, 0.5, 0.16, 0.1, 0.03, 1 / numbers):
        count = torch.full((9,), max(1, round(share * numbers)), device="cuda")
        sorted_rows = rows.sort(descending=True).values
        assert torch.equal(kth_largest(rows, count), sorted_rows.gather(1, count[:, None] - 1)[:, 0])


def test_thresholds_follow_numbers_that_move_whatever_the_hint():
    from smallbert.training.threshold_kernels import MISSED

    draw = torch.Generator("cuda").manual_seed(0)
    rows, speed, hint = torch.randn(5, 589_824, device="cuda", generator=draw), 0.0, Hint()
    rows[4, rows[4] < 1] = LOWEST
    for step in range(40):
        speed = 0.9 * speed + 1e-3 * torch.randn(rows.shape, device="cuda", generator=draw)
        rows = torch.where(rows == LOWEST, rows, rows * 1.001 + speed)
        shares = [0.1, 0.5 - 0.001 * step, 1.0, 1e-5, 0.6]
        count = torch.tensor([max(1, round(share * rows.shape[1])) for share in shares], device="cuda")
        right = rows.sort(descending=True).values.gather(1, count[:, None] - 1)[:, 0]
        assert torch.equal(kth_largest(rows, count, hint), right)
    misses = hint.kept[:, MISSED.value].tolist()
    assert max(misses[place] for place in (0, 1, 4)) < 10 and max(misses) < 20  # the least and the largest jump about
    for nonsense in (
        torch.zeros_like(hint.kept),
        torch.randint_like(hint.kept, -(2**31), 2**31 - 1),
        hint.kept.flip(1),
    ):
        assert torch.equal(kth_largest(rows, count, Hint(nonsense.clone())), right)


@pytest.mark.parametrize("scope", ["local", "global"])
def test_recorded_steps_cut_where_a_sort_would(monkeypatch, scope):
    from smallbert.training import ranking, threshold_kernels

    hints, looks, wrong = {}, torch.zeros((), device="cuda"), torch.zeros((), device="cuda")

    def looked_at(rows, counts, hint=None):  # counts on the device, so that it is recorded as well
        found = kth_largest(rows, counts, hint)
        right = rows.sort(descending=True).values.gather(1, counts[:, None] - 1)[:, 0]
        hints[rows.shape] = hint
        looks.add_(1)
        wrong.add_((found != right).sum())
        return found

    monkeypatch.setattr(threshold_kernels, "SAMPLE", 4096)  # so that rows of this size need rounds
    monkeypatch.setattr(ranking, "kth_largest", looked_at)
    phase = trained_phase(f"movement(0.3, scope='{scope}', finish=0.3) + train(epochs=4, lr=1e-3)", width=256)
    assert int(looks) == phase.total * len(hints)
    assert int(wrong) == 0
    for hint in hints.values():
        assert int(hint.kept[:, threshold_kernels.MISSED.value].min()) < phase.total / 2


@pytest.mark.parametrize("family", SHAPES)
def test_packed_attention_equals_padded(family):
    from test_walk import LENGTHS, make_batches

    encoder = wide(family).cuda()
    if not encoder.packable:
        pytest.skip("its attention cannot be packed")
    padded, packed = (batch.to("cuda") for batch in make_batches(LENGTHS, 6))
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        a, b = encoder.states(padded).last, encoder.states(packed).last
    torch.testing.assert_close(a[padded.attention_mask.bool()], b[0, : sum(LENGTHS)], atol=0.05, rtol=0.05)


@pytest.mark.parametrize(
    ("size", "longest", "dtype"),
    [(26, 20, torch.float32), (32, 40, torch.float32), (26, 20, HALF), (32, 40, HALF), (64, 103, HALF)],
)
def test_short_kernels_attend_like_the_reference(size, longest, dtype):
    from smallbert.model.attention import _attend_segments
    from smallbert.model.short_kernels import attend_short

    torch.manual_seed(0)
    lengths = torch.cat([torch.randint(1, longest + 1, (60,)), torch.tensor([longest, 0, 0, 1])])
    bounds = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).int().cuda()
    three = [torch.randn(int(lengths.sum()), 3, size, device="cuda", dtype=dtype).requires_grad_() for _ in range(3)]
    whole = [one.detach().float().requires_grad_() for one in three]
    found, expected = attend_short(*three, bounds, longest, 0.2), _attend_segments(*whole, bounds, longest, 0.2, -1)
    slopes = torch.randn_like(found)
    near = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.03, "rtol": 0.03}
    torch.testing.assert_close(found.float(), expected, **near)
    ours = torch.autograd.grad(found, three, slopes, retain_graph=True)
    for one, other in zip(ours, torch.autograd.grad(expected, whole, slopes.float()), strict=True):
        torch.testing.assert_close(one.float(), other, **near)
    again = torch.autograd.grad(found, three, slopes)
    assert all(torch.equal(one, other) for one, other in zip(ours, again, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("size", "their_size", "longest"), [(8, 8, 20), (26, 32, 40), (32, 64, 103)])
@pytest.mark.parametrize(("metric", "soften"), [("kl", True), ("mse", True), ("mse", False)])
def test_row_kernels_compare_like_plain_products(metric, soften, size, their_size, longest, dtype, monkeypatch):
    torch.manual_seed(0)
    stream = make_stream(60, longest)
    batch = make_batch(stream, np.arange(60), Layout(True, longest)).to("cuda")
    made = [
        torch.randn(1, 3, batch.input_ids.shape[1], width, device="cuda", dtype=dtype)
        for width in (size, size, their_size, their_size)
    ]
    ours = [one.requires_grad_() for one in made[:2]]
    slopes = torch.randn(batch.input_ids.shape, device="cuda") * batch.tokens()
    from smallbert.training import row_kernels

    theirs, found = Attending(*made[2:]), []
    asked = MagicMock(wraps=row_kernels.compare_rows)
    monkeypatch.setattr(row_kernels, "compare_rows", asked)
    for kernels in (True, True, False):
        monkeypatch.setattr(alignment, "KERNELS", kernels)
        (far,) = alignment.rows_apart([Attending(*ours)], [theirs], batch, metric, soften)
        found.append([far * batch.tokens(), *torch.autograd.grad(far, ours, slopes)])
    assert asked.call_count == 2
    assert all(torch.equal(one, other) for one, other in zip(*found[:2], strict=True))
    near = {"atol": 1e-4, "rtol": 1e-3} if dtype == torch.float32 else {"atol": 0.02, "rtol": 0.02}
    for one, other in zip(*found[1:], strict=True):
        torch.testing.assert_close(one, other, **near)


@pytest.mark.parametrize("layout", ["auto", "packed"])
@pytest.mark.parametrize("family", SHAPES)
def test_full_precision_trains_in_either_layout(family, layout):
    phase = trained_phase(f"distill + train(epochs=1, lr=1e-3, half=False, layout='{layout}', cache='none')", family)
    assert phase.packed == (layout == "packed" and phase.encoder.packable)
    assert phase.teachers["latest"].rounded is None


@pytest.mark.parametrize("family", SHAPES)
def test_a_teacher_in_half_precision_says_nearly_the_same(family):
    phase = trained_phase("align('hidden') + distill + train(epochs=1, lr=1e-6, layout='padded', cache='none')", family)
    teacher = phase.teachers["latest"]
    assert next(teacher.looking.parameters()).dtype == HALF
    batch = make_batch(phase.stream, [0, 1, 2], Layout(False, 64)).to("cuda")
    wanted = {"hidden": {1}}
    with torch.no_grad():
        found, expected = (one.look(batch, wanted) for one in (teacher.looking, teacher.encoder))
    torch.testing.assert_close(found.scores.float(), expected.scores, atol=0.05, rtol=0.05)
    torch.testing.assert_close(found.taps["hidden"][1].float(), expected.taps["hidden"][1], atol=0.05, rtol=0.05)


def trained_phase(recipe, family="bert", left=1.0, width=64):
    """A phase behind its last step; with `left`, of an encoder in which no more than that share was left before."""
    encoder = wide(family, width).cuda()
    head = {"kind": "classify", "labels": ["a", "b"], "outputs": 2, "from_pooler": encoder.pooler is not None}
    encoder.apply_method(METHODS["head"](), head)
    METHODS["head"]().fill(encoder, encoder, head, None, 0)
    (methods,) = Recipe(recipe)
    phase = Phase(encoder, tuple(methods), None, 0, {"latest": encoder.copy()})
    phase.stream = make_stream()
    if left < 1:
        prune_once(encoder, maskable(encoder), left, "local")
        hold_zeros(encoder, maskable(encoder))
        phase.hold_zeros()
    for method in phase.methods:
        method.attach(phase)
    phase.add_term_weights()
    train(phase, lambda *_: None)
    assert not phase.diverged
    return phase


def run(recipe, family="bert"):
    encoder = trained_phase(recipe, family).encoder
    return torch.cat([parameter.detach().flatten() for parameter in encoder.parameters()])


@pytest.mark.parametrize(
    "method",
    [
        "",
        "movement(0.3) + ",
        "magnitude(0.3, scope='global', first=0.6, stairs=4) + ",
        "movement(0.3, init='magnitude', fresh=True, train_weights=False) + ",
        "soft_movement(lr=0.3, begin=0.0) + ",
        "l0(lr=0.5) + ",
        "smooth_movement(0.3) + ",
        "second_order(0.3, events=3, gradients=8, damp=1e-4) + ",
        "rpp(pull=0.5, steps=10) + ",
        "distill + ",
        "align('attention', metric='kl') + align('relations') + align(transform='linear', schedule='stacked') + ",
        "align(transform='linear_each', schedule='progressive', task=0.0) + ",
    ],
)
def test_recorded_steps_equal_plain_steps(method):
    recorded, plain = (run(f"{method}train(epochs=2, lr=1e-3, graphs={graphs})") for graphs in (True, False))
    assert torch.equal(recorded, plain)


@pytest.mark.parametrize(
    "rounding",
    ["quantize_aware(8, True, smooth='search')", "quantize_aware(8, 'static', smooth='search')", "codebook_aware(3)"],
)
def test_recorded_steps_round_weights_and_scale_inputs(rounding):
    task, learn = toy_task(rows=64), "train(epochs=2, batch=8, lr=1e-3, graphs={})"
    start = run_recipe("finetune(epochs=1, batch=8)", small(hidden_size=64), task, device="cuda").encoder
    recipe = f"mark('teacher') | {rounding} + distill(teacher='teacher') + {learn}"
    made = [run_recipe(recipe.format(graphs), start, task, device="cuda").encoder for graphs in (True, False)]
    assert is_same_state(*made)


@pytest.mark.parametrize(
    "terms",
    [
        "align('first', transform='linear') + align(transform='linear') + distill + ",
        "align('attention', metric='kl') + align('relations', metric='kl') + distill + ",
    ],
)
@pytest.mark.parametrize("share", [0.0, 0.125])
def test_recorded_steps_read_what_a_teacher_said(share, terms, monkeypatch, tmp_path):
    monkeypatch.setattr("smallbert.features.asking.RESIDENT", share)  # none of the GPU: every batch brings it along
    settings = f"train(epochs=2, lr=1e-3, graphs={{}}, cache={str(tmp_path)!r})"
    recorded, plain = (run(terms + settings.format(graphs)) for graphs in (True, False))
    assert torch.equal(recorded, plain)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize(
    "method", ["movement(0.3)", "movement(0.3, fresh=True)", "smooth_movement(0.3, scope='local')"]
)
def test_zeros_held_from_before_are_the_first_to_go(method, graphs):
    phase = trained_phase(f"{method} + train(epochs=2, lr=1e-3, graphs={graphs})", left=0.4)
    phase.fold()
    for settled in phase.methods:
        settled.settle(phase)
    for name in maskable(phase.encoder):
        weight = phase.encoder.get_parameter(name)
        assert int(weight.count_nonzero()) == round(0.3 * weight.numel())


@pytest.mark.parametrize("family", SHAPES)
def test_every_family_trains(family):
    assert run("movement(0.5) + train(epochs=1, lr=1e-3)", family).isfinite().all()


def test_compiled_layers_train():
    compiled, plain = (run(f"train(epochs=1, lr=1e-3, dropout=0.0, compile={c})") for c in (True, False))
    torch.testing.assert_close(compiled, plain, atol=2e-2, rtol=0.1)


def test_fused_masks_follow_the_formula():
    from smallbert.training.masks import _Masked

    weights = [torch.randn(33, 70, device="cuda", requires_grad=True) for _ in range(11)]  # more than fit one launch
    scores = torch.randn(11, 33 * 70, device="cuda", requires_grad=True)
    cuts = torch.linspace(-3, 9, 11, device="cuda")
    seen = _Masked.apply(scores, cuts, *weights)
    slopes = [torch.randn_like(weight) for weight in weights]
    torch.autograd.backward(seen, slopes)
    for place, weight in enumerate(weights):
        mask = (scores[place] >= cuts[place]).view_as(weight)
        assert torch.equal(seen[place], weight * mask)
        assert torch.equal(weight.grad, slopes[place] * mask)
        assert torch.equal(scores.grad[place].view_as(weight), slopes[place] * weight)
