"""Each method against a formula worked out by hand."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.func import functional_call
from torch.nn import functional
from toys import (
    accuracy,
    batch_of,
    is_same_state,
    phase_of,
    run,
    scores_of,
    small,
    state_of,
    stream_of,
    toy_task,
)

from smallbert.errors import UserError
from smallbert.methods import METHODS, Method
from smallbert.methods.distill import divergence
from smallbert.methods.drop_layers import CHOICES
from smallbert.methods.quantize import WholeEmbedding, WholeLinear
from smallbert.model.folders import load_folder, save_folder
from smallbert.tasks.task import Split
from smallbert.texts.batches import Layout, make_batch
from smallbert.tiny import make_tokenizer
from smallbert.training.masks import maskable
from smallbert.training.schedule import Schedule, warmup_then_linear
from smallbert.training.teachers import view_of

TASK = toy_task("classify", 24)
WHOLE = "train(epochs=4, batch=24, lr=0.003, warmup=0.0, dropout=0.0)"  # four steps of one batch that holds everything


@pytest.fixture(scope="module")
def encoder():
    return run("head", small(), TASK).encoder


# Pruning.


@pytest.mark.parametrize("keep", [0.1, 0.3, 0.37, 0.5, 0.999])
@pytest.mark.parametrize("scope", ["local", "global"])
def test_magnitude_keeps_exactly_its_share(encoder, keep, scope):
    given = small(hidden_size=15, num_attention_heads=3, intermediate_size=31)  # shares that fall on a half
    outcome = run(f"magnitude({keep}, scope={scope!r}) + {WHOLE}", given, TASK, judge=False)
    left = {name: int(outcome.encoder.get_parameter(name).count_nonzero()) for name in maskable(given)}
    sizes = {name: given.get_parameter(name).numel() for name in left}
    assert set(sizes.values()) == {225, 465}
    if scope == "local":
        assert left == {name: round(keep * size) for name, size in sizes.items()}
    else:
        assert sum(left.values()) == round(keep * sum(sizes.values()))
        assert keep == 0.999 or len({left[name] / sizes[name] for name in left}) > 4
    share = f"{sum(left.values()) / sum(sizes.values()):.2%} of the {sum(sizes.values()):,} layer weights are left"
    assert any(note.startswith(share) for note in outcome.notes)


def test_magnitude_keeps_the_largest(encoder):
    result = run("magnitude(0.3) + train(epochs=1, batch=24, lr=1e-12, weight_decay=0.0)", encoder, TASK).encoder
    for name in maskable(encoder):
        before, after = encoder.get_parameter(name), result.get_parameter(name)
        smallest, largest = before[after != 0].abs().min(), before[after == 0].abs().max()
        assert smallest >= largest
        torch.testing.assert_close(after, before * (after != 0))


def test_schedule_values():
    cubic = Schedule(1.0, 0.1, begin=0.1, finish=0.7, shape="cubic")
    assert [cubic.at(x) for x in (0.0, 0.1, 0.7, 1.0)] == pytest.approx([1.0, 1.0, 0.1, 0.1])
    assert cubic.at(0.4) == pytest.approx(0.1 + 0.9 * (1 - (0.4 - 0.1) / 0.6) ** 3)  # Zhu and Gupta's formula
    assert Schedule(2.0, 4.0).at(0.25) == 2.5
    stairs = Schedule(0.0, 1.0, stairs=4)
    assert [stairs.at(x) for x in (0.0, 0.24, 0.25, 0.74, 0.75, 1.0)] == [0.0, 0.0, 0.25, 0.5, 0.75, 1.0]
    assert [Schedule(1.0, 0.2, shape="constant").at(x) for x in (0.0, 0.5)] == [0.2, 0.2]
    assert [Schedule(1.0, 0.0, begin=0.5, finish=0.5).at(x) for x in (0.0, 0.49, 0.5, 1.0)] == [1.0, 1.0, 0.0, 0.0]
    assert [warmup_then_linear(x, 0.1) for x in (0.0, 0.05, 0.1, 0.55, 1.0)] == pytest.approx([0.0, 0.5, 1.0, 0.5, 0.0])
    assert [warmup_then_linear(x, 0.0) for x in (0.0, 0.5, 1.0)] == pytest.approx([1.0, 0.5, 0.0])


@pytest.mark.parametrize("method", ["magnitude", "movement"])
def test_density_follows_the_schedule(encoder, method):
    phase = phase_of(f"{method}(0.2, begin=0.2, finish=0.6) + {WHOLE}", encoder, TASK)
    if method == "movement":
        for scores in phase.modules["movement"]:
            torch.nn.init.normal_(scores)
    schedule = Schedule(1.0, 0.2, 0.2, 0.6, "cubic")
    for phase.step in (0, 2, 3, 5, 6, 10):
        phase.set_dials()
        for weight in phase.weights().values():
            assert int(weight.count_nonzero()) == round(schedule.at(phase.step / 10) * weight.numel())


def test_movement_gradients_are_straight_through(encoder):
    phase = phase_of(f"movement(0.4, begin=0.0, finish=0.0) + {WHOLE}", encoder, TASK)
    phase.set_dials()
    for scores in phase.modules["movement"]:
        torch.nn.init.normal_(scores)
    phase.encoder.eval()
    batch = batch_of(encoder, TASK, range(24), "train")
    phase.loss({"student": batch}).backward()
    names = maskable(encoder)
    found = {name: scores for name, scores in score_of_each(phase, names).items()}
    leaves = {}
    for name in names:
        weight, (scores, _) = encoder.get_parameter(name), found[name]
        cut = scores.flatten().sort(descending=True).values[round(0.4 * scores.numel()) - 1]
        leaves[name] = (weight.detach() * (scores >= cut)).requires_grad_(True)
    scores = functional_call(encoder, leaves, (batch,))
    slopes = torch.autograd.grad(functional.cross_entropy(scores, batch.labels), list(leaves.values()))
    for (name, leaf), slope in zip(leaves.items(), slopes, strict=True):
        weight, (_, gradient) = encoder.get_parameter(name), found[name]
        torch.testing.assert_close(gradient, weight.detach() * slope, atol=1e-7, rtol=1e-4)
        mine = phase.encoder.get_parameter(name).grad
        torch.testing.assert_close(mine, slope * (leaf != 0), atol=1e-7, rtol=1e-4)


def score_of_each(phase: Any, names: list[str]) -> dict[str, Any]:
    """Scores and their gradients by the name of the weight; stacks hold matrices of one size in the order of names."""
    shapes = {name: phase.encoder.get_parameter(name).shape for name in names}
    rows = {}
    for stack in phase.modules["movement"]:
        same = [name for name in names if shapes[name].numel() == stack.shape[1]]
        for place, name in enumerate(same):
            slope = None if stack.grad is None else stack.grad[place].view(shapes[name])
            rows[name] = (stack[place].detach().view(shapes[name]), slope)
    return rows


@pytest.mark.parametrize("scope", ["local", "global"])
def test_movement_trajectory_equals_one_written_by_hand(encoder, scope):
    settings = "train(epochs=5, batch=24, lr=0.003, warmup=0.2, dropout=0.0, weight_decay=0.1, clip=0.5)"
    result = run(f"movement(0.3, scope={scope!r}, begin=0.0, finish=0.8) + {settings}", encoder, TASK).encoder
    mine, names = encoder.copy().eval(), maskable(encoder)
    scores = {name: torch.zeros_like(mine.get_parameter(name), requires_grad=True) for name in names}
    decayed = [p for p in mine.parameters() if p.dim() > 1]
    others = [p for p in mine.parameters() if p.dim() < 2]
    groups = [
        {"params": decayed, "weight_decay": 0.1, "base": 0.003},
        {"params": others, "weight_decay": 0.0, "base": 0.003},
        {"params": list(scores.values()), "weight_decay": 0.0, "base": 0.01},
    ]
    optimiser = torch.optim.AdamW(groups, fused=True)
    batch = batch_of(mine, TASK, range(24), "train")

    def mask(progress: float) -> dict[str, Any]:
        keep = 0.3 + 0.7 * (1 - min(progress / 0.8, 1.0)) ** 3
        pools = [list(scores)] if scope == "global" else [[name] for name in scores]
        masks = {}
        for pool in pools:
            flat = torch.cat([scores[name].detach().flatten() for name in pool])
            cut = flat.sort(descending=True).values[round(keep * flat.numel()) - 1]
            masks |= {name: scores[name].detach() >= cut for name in pool}
        return masks

    for step in range(5):
        masks = mask(step / 5)
        leaves = {name: (mine.get_parameter(name).detach() * masks[name]).requires_grad_(True) for name in names}
        optimiser.zero_grad()
        functional.cross_entropy(functional_call(mine, leaves, (batch,)), batch.labels).backward()
        for name, leaf in leaves.items():
            scores[name].grad = mine.get_parameter(name).detach() * leaf.grad
            mine.get_parameter(name).grad = masks[name] * leaf.grad
        torch.nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], 0.5)
        progress = (step + 1) / 6
        factor = progress / 0.2 if progress < 0.2 else (1 - progress) / 0.8
        for group in optimiser.param_groups:
            group["lr"] = group["base"] * factor
        optimiser.step()
    final = mask(1.0)
    for name, tensor in state_of(mine).items():
        if name.endswith("key.bias"):  # softmax does not see it: its gradient is rounding noise, which Adam blows up
            continue
        wanted = tensor * final[name] if name in final else tensor
        torch.testing.assert_close(result.state_dict()[name], wanted, atol=1e-5, rtol=1e-5)
    zeros = sum(int((result.get_parameter(name) == 0).sum()) for name in names)
    assert zeros > 0.3 * sum(result.get_parameter(name).numel() for name in names)


@pytest.mark.parametrize("method", ["magnitude", "movement"])
def test_a_full_mask_trains_like_no_mask(encoder, method):
    settings = "train(epochs=2, batch=8, lr=0.003, clip=0.0)"  # with dropout; scores would count in the joint norm
    masked = run(f"{method}(0.5, begin=1.0, finish=1.0) + {settings}", encoder, TASK).encoder
    dense = run(settings, encoder, TASK).encoder
    names = set(maskable(encoder))
    for name, tensor in dense.state_dict().items():
        mine = masked.state_dict()[name]
        assert torch.equal(mine, tensor * (mine != 0) if name in names else tensor)


def test_two_masks_in_one_phase_are_refused(encoder):
    with pytest.raises(UserError, match="one method that decides which weights are kept, but magnitude and movement"):
        run(f"magnitude + movement + {WHOLE}", encoder, TASK)
    with pytest.raises(UserError, match="both schedule 'keep'"):
        phase_of(f"magnitude + {WHOLE}", encoder, TASK).dial("keep", 0.5)
    for text in ("magnitude(1.0)", "magnitude(0.0)", "movement(0.1, begin=0.8, finish=0.2)", "drop_layers(0)"):
        with pytest.raises(UserError):
            run(text, encoder, TASK)


# Distillation.


def numpy_kl(student: np.ndarray, teacher: np.ndarray, temperature: float) -> np.ndarray:
    def soft(scores: np.ndarray) -> np.ndarray:
        shifted = np.exp((scores - scores.max(-1, keepdims=True)) / temperature)
        return shifted / shifted.sum(-1, keepdims=True)

    p, q = soft(teacher), soft(student)
    return temperature**2 * np.where(p > 0, p * np.log(np.where(p > 0, p, 1) / np.where(q > 0, q, 1)), 0).sum(-1)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["classify", "regress", "tag", "answer"])
def test_divergence_is_the_textbook_formula(kind, packed):
    task = toy_task(kind, 24)
    encoder = run("head", small(), task).encoder
    batch = batch_of(encoder, task, packed=packed, slots=7)
    step = type("Step", (), {"batch": batch})
    student = scores_of(encoder, task, packed=packed, slots=7).double()
    teacher = student + torch.randn(student.shape, generator=torch.Generator().manual_seed(0))
    assert (divergence(kind, student, student, step, 3.0) == 0).all()
    found = divergence(kind, student, teacher, step, 3.0)
    one, two = student.numpy(), teacher.numpy()
    if kind == "regress":
        wanted = ((one - two) ** 2)[:5, 0]
    elif kind == "classify":
        wanted = numpy_kl(one, two, 3.0)[:5]
    elif kind == "tag":
        real = (batch.labels.flatten() >= 0).numpy()
        wanted, found = numpy_kl(one, two, 3.0).flatten()[real], found[torch.from_numpy(real)]
    else:
        lengths = stream_of(encoder, task).views["student"].lengths[:5]
        rows = [np.split(x[0], np.cumsum([*lengths])) if packed else x for x in (one, two)]
        wanted = np.array(
            [
                sum(numpy_kl(rows[0][n][:k, side], rows[1][n][:k, side], 3.0) for side in (0, 1)) / 2
                for n, k in enumerate(lengths)
            ]
        )
    np.testing.assert_allclose(found.numpy()[: len(wanted)], wanted, rtol=1e-4, atol=1e-6)
    if kind != "tag":
        assert (found[5:] == 0).all()  # rows that only fill the shape


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["classify", "regress", "tag", "answer"])
def test_other_metrics_of_scores(kind, packed):
    task = toy_task(kind, 24)
    encoder = run("head", small(), task).encoder
    batch = batch_of(encoder, task, packed=packed, slots=7)
    step = type("Step", (), {"batch": batch})
    student = scores_of(encoder, task, packed=packed, slots=7)
    teacher = student + torch.randn(student.shape, generator=torch.Generator().manual_seed(0))
    measure = lambda ours, theirs, metric: divergence(kind, ours, theirs, step, 3.0, metric)  # noqa: E731
    assert (measure(student, student, "mse") == 0).all()
    if kind == "regress":
        assert torch.equal(measure(student, teacher, "mse"), measure(student, teacher, "kl"))
        return
    entropy = measure(teacher, teacher, "ce")
    torch.testing.assert_close(
        measure(student, teacher, "ce"), entropy + measure(student, teacher, "kl"), atol=1e-3, rtol=1e-4
    )
    apart = (student - teacher).square().mean(-1)
    if kind == "tag":
        wanted = (apart * (batch.labels >= 0)).flatten()
    elif kind == "answer":
        wanted = batch.mean(apart[..., None])[:, 0] * batch.present
    else:
        wanted = apart * batch.present
    torch.testing.assert_close(measure(student, teacher, "mse"), wanted)


@pytest.mark.parametrize("kind", ["classify", "tag", "answer"])
def test_a_student_that_is_its_teacher_has_nothing_to_learn(kind):
    task = toy_task(kind, 24)
    trained = run(WHOLE, small(), task, judge=False).encoder
    phase = phase_of(f"distill(alpha=1.0) + {WHOLE}", trained, task)
    batch = batch_of(trained, task, range(12))
    assert float(phase.loss({"student": batch})) == 0.0
    mixed = phase_of(f"distill(alpha=0.25) + {WHOLE}", trained, task)
    plain = phase_of(WHOLE, trained, task)
    mixed.set_dials()
    assert float(mixed.loss({"student": batch})) == pytest.approx(0.75 * float(plain.loss({"student": batch})))


def test_a_distilbert_student_leaves_the_token_types_to_its_teacher(tmp_path):
    task = toy_task("pair", 24)
    teacher = run(WHOLE, small("bert"), task, judge=False).encoder
    save_folder(teacher, tmp_path / "teacher")
    phase = phase_of(f"distill(teacher={str(tmp_path / 'teacher')!r}) + {WHOLE}", small("distilbert"), task)
    found = phase.teacher(str(tmp_path / "teacher"))
    assert not found.training and not any(parameter.requires_grad for parameter in found.parameters())
    batch = make_batch(phase.stream, np.arange(6), Layout(False, 64))
    step = phase.look_at({"student": batch})
    assert batch.token_type_ids.sum() > 0
    own = scores_of(teacher, task, index=range(6), split="train")
    assert torch.equal(found(step.batch_for(str(tmp_path / "teacher"))), own)
    without = found(replace(batch, token_type_ids=torch.zeros_like(batch.token_type_ids)))
    assert not torch.allclose(without, own, atol=1e-4)  # it would have noticed


@pytest.mark.parametrize("kind", ["classify", "regress", "tag"])
def test_a_teacher_may_read_more_of_a_text_than_its_student(kind):
    """The student reads six words of a text, the teacher all; what it alone sees is no word of the student's."""
    task = toy_task(kind, 24)
    encoder = run("head", small(), task).encoder
    phase = phase_of(f"distill(length=40, alpha=1.0) + {WHOLE}", encoder, task, length=8)
    view = view_of("latest")
    whole, short = stream_of(encoder, task, "train").views["student"], phase.stream.views["student"]
    assert np.array_equal(phase.stream.views[view].ids, whole.ids)
    assert max(short.lengths) == 8 < max(whole.lengths)
    batches = {name: make_batch(phase.stream, np.arange(9), Layout(False, 64), view=name) for name in ("student", view)}
    phase.encoder.eval()
    found = phase.loss(batches).item()
    with torch.no_grad():
        ours, theirs = (encoder(batches[name]) for name in ("student", view))
    if kind == "tag":  # each word the student sees is the same token of the teacher's longer text
        theirs = theirs[:, : ours.shape[1]]
    each = divergence(kind, ours, theirs, phase.look_at(batches), 2.0)
    assert found == pytest.approx(each.sum().item() / 9, rel=1e-3) and found > 0
    assert not run(f"distill(length=40) + {WHOLE}", encoder, task, length=8, judge=False).diverged


def test_a_teacher_that_reads_more_is_refused_where_tokens_or_spans_are_compared(encoder):
    for recipe, model, task, words in (
        (f"align('hidden') + distill(length=40) + {WHOLE}", encoder, TASK, "compares both on the same"),
        (
            f"distill(length=40) + {WHOLE}",
            run("head", small(), toy_task("answer")).encoder,
            toy_task("answer"),
            "spans",
        ),
        ("distill(length=3)", encoder, TASK, "8 or more"),
    ):
        with pytest.raises(UserError, match=words):
            run(recipe, model, task)


def test_the_teacher_stays_in_evaluation_mode_while_training(encoder):
    modes = []
    with METHODS.for_now():

        class Spy(Method):
            """Looks at the teacher in the middle of training."""

            def after_backward(self, phase: Any) -> None:
                modes.append((phase.encoder.training, phase.teacher("latest").training))

        run(f"spy + distill + {WHOLE}", encoder, TASK)
    assert modes == [(True, False)] * 4


def test_the_teacher_is_the_latest_trained_one_or_the_one_named(encoder):
    teachers = {}
    with METHODS.for_now():

        class Keep(Method):
            """Keeps the teachers that a phase would have."""

            def attach(self, phase: Any) -> None:
                teachers.update({name: phase.teacher(name) for name in ("latest", "start")})

        run(f"mark('start') | {WHOLE} | {WHOLE} | drop_layers(1) | keep + distill + {WHOLE}", encoder, TASK)
    assert is_same_state(teachers["latest"], run(f"{WHOLE} | {WHOLE}", encoder, TASK).encoder)
    assert is_same_state(teachers["start"], encoder)
    one, other = (
        run(f"mark('start') | {WHOLE} | distill(teacher={name!r}, alpha=1.0) + {WHOLE}", encoder, TASK, judge=False)
        for name in ("latest", "start")
    )
    assert not is_same_state(one.encoder, other.encoder)


def test_a_teacher_with_another_tokenizer_reads_its_own_view(tmp_path):
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    task = toy_task("pair", 24)
    teacher = small("bert", seed=3)
    text = teacher.tokenizer.backend_tokenizer.to_str()
    teacher.tokenizer = PreTrainedTokenizerFast(  # another number for each of two words
        tokenizer_object=Tokenizer.from_str(re.sub(r'"great": ?(\d+)', '"great":98', text)),
        **{f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")},
    )
    teacher = run(WHOLE, teacher, task, judge=False).encoder
    save_folder(teacher, tmp_path / "teacher")
    recipe = f"distill(teacher={str(tmp_path / 'teacher')!r}) + {WHOLE}"
    phase = phase_of(recipe, small("bert"), task)
    view = view_of(str(tmp_path / "teacher"))
    assert set(phase.stream.views) == {"student", view}
    batch = make_batch(phase.stream, np.arange(6), Layout(False, 64), view=view)
    own = scores_of(teacher, task, index=range(6), split="train")
    assert torch.equal(phase.teacher(str(tmp_path / "teacher"))(batch), own)
    run(recipe, small("bert"), task)
    words = toy_task("tag", 24)
    tagger = run(WHOLE, small("bert", seed=3), words).encoder
    tagger.tokenizer = make_tokenizer()  # the same as the student's, though that one was told to cut texts
    save_folder(tagger, tmp_path / "tagger")
    same = phase_of(f"distill(teacher={str(tmp_path / 'tagger')!r}) + {WHOLE}", small("distilbert"), words)
    assert set(same.stream.views) == {"student"}
    spans = toy_task("answer", 24)
    reader = run("head", small("bert", seed=3), spans).encoder
    reader.tokenizer = teacher.tokenizer
    save_folder(reader, tmp_path / "reader")
    with pytest.raises(UserError, match="another tokenizer"):
        run(f"distill(teacher={str(tmp_path / 'reader')!r}) + {WHOLE}", small("distilbert"), spans)


def test_a_teacher_must_answer_in_the_same_terms(encoder, tmp_path):
    with pytest.raises(UserError, match="nothing was trained yet"):
        run(f"distill + {WHOLE}", small(), TASK)
    save_folder(encoder, tmp_path / "two")
    with pytest.raises(UserError, match="for classify with 2 classes, the student's for classify with 3 classes"):
        run(f"distill(teacher={str(tmp_path / 'two')!r}) + {WHOLE}", small(), toy_task("pair", 24))
    swapped = encoder.copy()
    swapped.history[0]["plan"]["labels"] = swapped.head.labels = ["good", "bad"]
    save_folder(swapped, tmp_path / "swapped")
    with pytest.raises(UserError, match="good, bad"):
        run(f"distill(teacher={str(tmp_path / 'swapped')!r}) + {WHOLE}", small(), TASK)


def test_a_teacher_with_fewer_places_is_refused(encoder, tmp_path):
    save_folder(encoder, tmp_path / "teacher")  # has 72 places
    rows = Split([" ".join(["good"] * 100), "bad", "good film"], None, [1, 0, 1], list("abc"))
    task = replace(TASK, length=200, splits={"train": rows})
    recipe = f"distill(teacher={str(tmp_path / 'teacher')!r}) + {WHOLE}"
    student = small(max_position_embeddings=150)
    with pytest.raises(UserError, match="at most 72 tokens, but a text of the task has 102"):
        run(recipe, student, task)
    assert run(recipe, student, task, length=72, judge=False).steps == 4


def test_a_teacher_that_cannot_be_packed_is_not_given_packed_batches(tmp_path):
    teacher = run(WHOLE, small("mpnet"), TASK, judge=False).encoder
    save_folder(teacher, tmp_path / "teacher")
    settings = "train(epochs=1, batch=8, lr=0.003, dropout=0.0, layout={!r})"
    recipes = [f"distill(teacher={str(tmp_path / 'teacher')!r}) + {settings.format(x)}" for x in ("packed", "padded")]
    packed, padded = (run(recipe, small(), TASK, judge=False) for recipe in recipes)
    assert not packed.packed and any("mpnet attention cannot be packed" in note for note in packed.notes)
    assert is_same_state(packed.encoder, padded.encoder)


# Quantisation.


def test_quantize_rounds_within_half_a_step(encoder):
    result = run("quantize", encoder, TASK).encoder
    found = {n: m for n, m in result.named_modules() if isinstance(m, WholeLinear | WholeEmbedding)}
    assert {"backbone.embeddings.word_embeddings", "heads.task.dense"} <= set(found)
    assert sum(isinstance(module, WholeLinear) for module in found.values()) == 13
    for name, module in found.items():
        before = encoder.get_submodule(name).weight.detach()
        real = module.weight.float() * module.scale[:, None]
        bound = before.abs().amax(1, keepdim=True) / 254
        assert ((real - before).abs() <= bound * (1 + 1e-5)).all()
        assert module.weight.dtype == torch.int8 and module.weight.abs().max() <= 127
        assert torch.equal(module.weight.abs().amax(1), torch.full_like(module.weight[:, 0], 127))
    difference = (scores_of(result, TASK) - scores_of(encoder, TASK)).abs().max()
    assert 0 < difference < 0.05


def test_quantized_folder_is_about_a_quarter(tmp_path):
    big = run("head", small(hidden_size=128, intermediate_size=512, vocab_size=4000), TASK).encoder
    sizes = []
    for recipe in ("mark('x')", "quantize"):
        save_folder(run(recipe, big, TASK).encoder, tmp_path / "model")
        sizes.append((tmp_path / "model" / "model.safetensors").stat().st_size)
    assert 0.25 < sizes[1] / sizes[0] < 0.28


def test_quantized_activations_are_near_and_their_training_view_agrees(encoder):
    plain, whole = run("quantize", encoder, TASK).encoder, run("quantize(activations=True)", encoder, TASK).encoder
    assert torch.equal(plain.state_dict()["heads.task.dense.weight"], whole.state_dict()["heads.task.dense.weight"])
    difference = (scores_of(whole, TASK) - scores_of(plain, TASK)).abs().max()
    assert 0 < difference < 0.05
    layer = whole.get_submodule("heads.task.dense")
    inputs = torch.randn(6, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(layer.train()(inputs), layer.eval()(inputs), atol=1e-5, rtol=0)


def test_quantize_sees_weights_that_change_later(encoder):
    result = run("quantize", encoder, TASK).encoder
    before = scores_of(result, TASK)
    with torch.no_grad():
        result.get_submodule("heads.task.dense").scale.mul_(2)
    assert not torch.equal(scores_of(result, TASK), before)


# Mixtures.


def numpy_mixture(stack: np.ndarray, weights: np.ndarray, gamma: float, norm: str) -> np.ndarray:
    """A stack (layers, …, features) mixed as the papers write it, the axes of the norm taken at once."""
    shares = np.exp(weights) / np.exp(weights).sum()
    axes = {"token": (0, -1), "feature": (-1,), "layer": (0,)}.get(norm)
    if axes:
        mean, variance = stack.mean(axes, keepdims=True), stack.var(axes, keepdims=True)
        stack = (stack - mean) / np.sqrt(variance + 1e-6)
    return gamma * np.einsum("l,l...->...", shares, stack)


@pytest.mark.parametrize("norm", ["token", "feature", "layer", "none"])
def test_mixture_is_the_formula(encoder, norm):
    result = run(f"mix_layers(norm={norm!r})", encoder, TASK, seed=4).encoder.eval()
    with torch.no_grad():
        result.mixture.gamma.fill_(1.7)
        batch = batch_of(result, TASK)
        states = result.states(batch)
        found = result.output(states, batch)
    stack = np.stack([hidden.double().numpy() for hidden in states.hidden])
    wanted = numpy_mixture(stack, result.mixture.weights.detach().double().numpy(), 1.7, norm)
    np.testing.assert_allclose(found.numpy(), wanted, atol=1e-5, rtol=1e-4)
    assert len(stack) == 3 and abs(float(result.mixture.shares().sum()) - 1) < 1e-6


def test_mixture_inits(encoder):
    zeros, one, two = (
        run(f"mix_layers(init={init!r})", encoder, TASK, seed=seed).encoder.mixture
        for init, seed in (("zeros", 0), ("xavier", 0), ("xavier", 1))
    )
    assert torch.equal(zeros.shares(), torch.full((3,), 1 / 3)) and float(zeros.gamma) == 1
    assert not torch.equal(one.weights, two.weights) and one.weights.abs().max() <= (6 / 4) ** 0.5


@pytest.mark.parametrize("norm", ["token", "feature", "layer", "none"])
def test_plain_mixture_starts_as_the_plain_model_and_trains(encoder, norm):
    mixed = run(f"mix_layers(init='plain', norm={norm!r})", encoder, TASK).encoder
    assert torch.equal(scores_of(mixed, TASK), scores_of(encoder, TASK))
    phase = phase_of(WHOLE, mixed, TASK)
    assert torch.equal(phase.look_at({"student": batch_of(mixed, TASK)}).scores, scores_of(encoder, TASK))
    trained = run(WHOLE, mixed, TASK).encoder
    assert float(trained.mixture.gamma.abs()) > 1e-3
    assert not torch.equal(trained.mixture.weights, mixed.mixture.weights)


# Layers.


def test_which_layers_stay():
    table = {which: [CHOICES[which](keep, 12) for keep in (1, 3, 4, 6)] for which in CHOICES}
    assert table == {
        "even": [[11], [3, 7, 11], [2, 5, 8, 11], [1, 3, 5, 7, 9, 11]],
        "first": [[0], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4, 5]],
        "last": [[11], [9, 10, 11], [8, 9, 10, 11], [6, 7, 8, 9, 10, 11]],
        "spread": [[0], [0, 6, 11], [0, 4, 7, 11], [0, 2, 4, 7, 9, 11]],
        "ends": [[0], [0, 1, 11], [0, 1, 10, 11], [0, 1, 2, 9, 10, 11]],
    }
    for total in range(2, 26):
        for keep in range(1, total):
            for which in CHOICES:
                kept = CHOICES[which](keep, total)
                assert len(set(kept)) == keep and sorted(kept) == kept and 0 <= kept[0] and kept[-1] < total


@pytest.mark.parametrize("which", list(CHOICES))
def test_dropped_layers_are_the_ones_not_run(tiny, which):
    encoder = tiny("bert")
    result = run(f"drop_layers(2, which={which!r})", encoder).encoder
    kept = CHOICES[which](2, 4)
    batch = batch_of(encoder, TASK)
    skipping = encoder.states(batch, route=lambda place, hidden, layer: layer(hidden) if place in kept else hidden)
    assert torch.equal(result.states(batch).last, skipping.last)
    assert result.backbone.config.num_hidden_layers == 2 and encoder.backbone.config.num_hidden_layers == 4
    half = run(f"drop_layers(0.5, which={which!r})", encoder).encoder
    assert is_same_state(half, result)


def test_too_many_layers_are_refused(encoder):
    for keep in (2, 5):
        with pytest.raises(UserError, match="has 2 layers, so keep must be 1 to 1"):
            run(f"drop_layers({keep})", encoder, TASK)


# Everything at once.


def test_mask_mixture_and_teacher_train_in_one_loop():
    task = toy_task("classify", 240)
    teacher = run("train(epochs=6, batch=8, lr=0.003)", small(hidden_size=32), task).encoder
    assert accuracy(teacher, task) > 95
    losses = []
    outcome = run(
        "mix_layers | magnitude(0.3) + distill + train(epochs=2, batch=8, lr=0.003)",
        teacher,
        task,
        say=lambda stage, done, total, info: losses.append(float(info[5:])) if stage == "training" else None,
    )
    result = outcome.encoder
    assert outcome.steps == 60 and not outcome.diverged
    assert accuracy(result, task) > 80 and losses[-1] < losses[0] / 2
    for name in maskable(result):
        weight = result.get_parameter(name)
        assert int(weight.count_nonzero()) == round(0.3 * weight.numel())
    assert not torch.equal(result.mixture.weights, run("mix_layers", teacher, task).encoder.mixture.weights)
    assert [entry["step"].split("(")[0] for entry in result.history[-4:]] == [
        *("mix_layers", "magnitude", "distill", "train")
    ]


def test_loading_knows_nothing_of_training(encoder, tmp_path):
    result = run(f"mix_layers | movement(0.5) + {WHOLE}", encoder, TASK).encoder
    save_folder(result, tmp_path / "model")
    loaded = load_folder(tmp_path / "model")
    assert not any("movement" in name or "scores" in name for name in loaded.state_dict())
    assert loaded.mixture.own_rate == 0.01 and len(loaded.held("zeros")) == 12


def test_python_may_leave_the_bar_out():
    """A method, a class and methods of one phase are recipes too."""
    drop = METHODS["drop_layers"]
    for recipe in (drop(1), drop, drop(1) + METHODS["train"](epochs=0.1)):
        task = toy_task("classify") if recipe not in (drop, drop(1)) else None
        assert len(run(recipe, small(layers=2), task).encoder.order) == 1
