"""Poolers: what they compute, what they leave alone, what they cost, and the paper's controls as recipes."""

import json
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional
from toys import accuracy, batch_of, is_same_state, phase_of, run, scores_of, small, state_of, toy_task

from smallbert.errors import UserError
from smallbert.making.make import make_one
from smallbert.making.starting import Start
from smallbert.measuring.cost import count_macs, count_parameters
from smallbert.model.answering import with_plain_head
from smallbert.model.batch import Batch
from smallbert.model.encoder import PLAIN
from smallbert.model.folders import load_folder, save_folder
from smallbert.model.heads import Head
from smallbert.model.mixing import Mixture
from smallbert.model.pooling import AdapterPooler, AttentionPooler, MixturePooler, Projection, initialise, pad_to
from smallbert.training.loop import _clip, take_step

KINDS = ("classify", "regress", "tag", "answer")
FORMS = {
    "adapter": "pool_layers",
    "mean": "pool_layers(tokens='mean', norm='feature')",
    "first": "pool_layers(tokens='first')",
    "unmasked": "pool_layers(masked=False)",
    "attention": "pool_layers('attention')",
    "attention, unmasked": "pool_layers('attention', masked=False, layers=[1, 2])",
    "mix": "pool_layers('mix')",
}
SHORT = "train(epochs=1, batch=8, lr=0.001)"
FROZEN = "train(epochs=1, batch=8, lr=0.001, freeze='backbone')"
every_form = pytest.mark.parametrize("form", list(FORMS.values()), ids=list(FORMS))
every_kind = pytest.mark.parametrize("kind", KINDS)


def stack(count=4, size=8):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 5, size, generator=generator) * (n + 1) for n in range(count)]


def padded():
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    ids, place = torch.ones_like(mask), torch.arange(5).expand(3, -1)
    return Batch(ids, 0 * ids, place, attention_mask=mask, size=3, longest=5)


def packed(states):
    """The batch of `padded` and its states without padding, and with two tokens of filler behind."""
    lengths = [3, 5, 2, 2]
    place = torch.cat([torch.arange(length) for length in lengths])[None]
    sequence = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    bounds = torch.tensor([0, 3, 8, 10, 12], dtype=torch.int32)
    ids = torch.ones_like(place)
    batch = Batch(ids, 0 * ids, place, bounds=bounds, sequence=sequence, size=3, longest=5)
    real = padded().tokens()
    return batch, [torch.cat([state[real], torch.full((2, state.shape[-1]), 9.0)])[None] for state in states]


def drawn(pooler):
    initialise(pooler, 0.02, torch.Generator().manual_seed(1))
    with torch.no_grad():
        for name in ("query", "layers"):
            if hasattr(pooler, name):
                getattr(pooler, name).copy_(torch.randn(getattr(pooler, name).shape))
        pooler.out.bias.copy_(torch.arange(len(pooler.out.bias)))
    return pooler.eval()


def adapter(kind="classify", tokens="positions", reads=(0, 1, 2, 3), length=4, padded_to=0):
    return drawn(AdapterPooler(kind, 2, ["a", "b"], list(reads), Projection(8, 3), tokens, length, padded_to))


# What they compute.


@pytest.mark.parametrize("masked", [True, False])
def test_adapter_by_position_is_the_papers_flattening(masked):
    pooler, states = adapter(padded_to=0 if masked else 4), stack()
    small = functional.gelu(pooler.project.linear(torch.stack(states, 1)))  # (texts, layers, tokens, width)
    if masked:
        small = small * padded().attention_mask[:, None, :, None]
    flat = small[:, :, :4].reshape(3, -1)  # only four of five tokens are read
    torch.testing.assert_close(pooler(iter(states), padded()), pooler.out(flat))


def test_adapter_of_each_token_is_algorithm_1():
    pooler, states = adapter("answer"), stack()
    depth_last = functional.gelu(pooler.project.linear(torch.stack(states, 2)))  # (texts, tokens, layers, width)
    scores = pooler(states, padded())
    assert scores.shape == (3, 5, 2)
    torch.testing.assert_close(scores, pooler.out(depth_last.flatten(2)))


def test_adapter_of_means_reads_own_tokens_alone():
    pooler, states, batch = adapter(tokens="mean"), stack(), padded()
    for row, length in enumerate((3, 5, 2)):
        means = [functional.gelu(pooler.project.linear(state[row, :length])).mean(0) for state in states]
        torch.testing.assert_close(pooler(states, batch)[row], pooler.out(torch.cat(means)))


def test_norm_takes_scale_and_mean_away_and_has_no_weights():
    plain, normed = Projection(8, 3), Projection(8, 3, "feature")
    normed.load_state_dict(plain.state_dict())
    state = stack()[1]
    torch.testing.assert_close(normed(state), normed(7 * state + 3), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(plain(state), plain(7 * state + 3))


def test_what_a_projection_makes_is_dropped_in_training_alone():
    project, state = Projection(8, 3, dropout=0.5), stack(1)[0]
    plain = functional.gelu(project.linear(state))
    assert torch.equal(project.eval()(state), plain)
    torch.manual_seed(0)
    found = project.train()(state)
    torch.manual_seed(0)
    assert torch.equal(found, functional.dropout(plain, 0.5)) and not torch.equal(found, plain)


@pytest.mark.parametrize("kind", ["classify", "tag"])
def test_attention_is_the_formula(kind):
    pooler = drawn(AttentionPooler(kind, 2, ["a", "b"], [0, 2, 3], Projection(8, 3)))
    states, batch = stack(), padded()
    small = [
        functional.gelu(pooler.project.linear(states[number]) + pooler.layers[place])
        for place, number in enumerate((0, 2, 3))
    ]
    scores = pooler(states, batch)
    for row, length in enumerate((3, 5, 2)):
        if kind == "classify":
            seen = torch.cat([one[row, :length] for one in small])
            torch.testing.assert_close(scores[row], pooler.out((seen @ pooler.query).softmax(0) @ seen))
        for token in range(length) if kind == "tag" else ():
            seen = torch.stack([one[row, token] for one in small])
            torch.testing.assert_close(scores[row, token], pooler.out((seen @ pooler.query).softmax(0) @ seen))


@pytest.mark.parametrize("norm", ["none", "feature"])
def test_a_state_kept_in_half_precision_is_read_as_if_it_were_whole_and_is_not_remembered_so(norm):
    project, state = Projection(8, 3, norm), stack(1)[0].half()
    found, remembered = [], []
    for one in (state, state.float()):
        project.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(lambda kept: remembered.append(kept) or kept, lambda kept: kept):
            made = project(one, torch.ones(3))
        made.square().sum().backward()
        found.append([made.detach(), *(weight.grad.clone() for weight in project.parameters())])
        whole = [kept for kept in remembered if kept.dtype == torch.float32 and kept.numel() == state.numel()]
        assert bool(whole) == (one is not state), "made ready again on the way back"
        remembered.clear()
    for mine, wanted in zip(*found, strict=True):
        assert torch.equal(mine, wanted) and mine.abs().max() > 0


def test_a_map_of_another_kind_reads_kept_states_in_its_own_way():
    """A quantised pooler has codes for weights; multiplying with those would be wrong, or fail."""

    class Twice(torch.nn.Linear):
        def forward(self, state):
            return 2 * super().forward(state)

    project, state = Projection(8, 3, "none"), stack(1)[0].half()
    project.linear = Twice(8, 3)
    assert torch.equal(project(state), project(state.float()))


def test_a_kept_state_is_read_on_the_way_back_as_it_was_on_the_way_there():
    """While training in half precision, the weights are rounded ones only until the loss is there."""
    project, state = Projection(8, 3), stack(1)[0].half()
    owner, stored = project.linear._parameters, dict(project.linear._parameters)
    for name, weight in stored.items():
        owner[name] = weight.bfloat16()
    made = project(state)
    owner.update(stored)
    made.sum().backward()
    assert made.dtype == torch.bfloat16 and project.linear.weight.grad.abs().max() > 0


def test_attention_with_a_query_of_zeros_is_a_mean():
    pooler = drawn(AttentionPooler("classify", 2, ["a", "b"], [0, 1], Projection(8, 3)))
    with torch.no_grad():
        pooler.query.zero_()
        pooler.layers.zero_()
    batch, small = padded(), [pooler.project(state) for state in stack(2)]
    torch.testing.assert_close(pooler(stack(2), batch), pooler.out(batch.mean((small[0] + small[1]) / 2)))


def test_a_mix_is_a_mixture_and_a_head():
    config = small("bert").backbone.config
    for kind, pool in (("classify", "first"), ("classify", "mean"), ("tag", "first")):
        head, mixture = Head(kind, 2, config, ["a", "b"], pool).eval(), Mixture([0, 2], "none").eval()
        with torch.no_grad():
            mixture.weights.copy_(torch.tensor([0.0, 1.0]))
        states = stack(4, config.hidden_size)
        mixed = sum(share * states[n] for share, n in zip(mixture.weights.softmax(0), (0, 2), strict=True))
        torch.testing.assert_close(MixturePooler(head, mixture)(states, padded()), head(mixed, padded()))


def poolers():
    config = small("bert", hidden_size=8, num_attention_heads=2).backbone.config
    made = {f"adapter {tokens}": adapter(tokens=tokens) for tokens in ("positions", "mean", "first")}
    made |= {f"adapter {kind}": adapter(kind) for kind in ("tag", "answer")}
    for kind in ("classify", "tag"):
        made[f"attention {kind}"] = drawn(AttentionPooler(kind, 2, ["a", "b"], [0, 1, 2, 3], Projection(8, 3)))
        made[f"mix {kind}"] = drawn(MixturePooler(Head(kind, 2, config, ["a", "b"]), Mixture([0, 1, 2, 3], "none")))
    return made


@pytest.mark.parametrize("name", list(poolers()))
def test_padding_and_packing_change_nothing(name):
    pooler, states = poolers()[name], stack()
    whole, real = pooler(states, padded()), padded().tokens()
    noisy = [torch.where(real[..., None], state, 100.0) for state in states]
    wanted = whole if pooler.whole else whole[real]
    other = pooler(noisy, padded())
    torch.testing.assert_close(other if pooler.whole else other[real], wanted)
    batch, tokens = packed(states)
    other = pooler(tokens, batch)
    torch.testing.assert_close(other if pooler.whole else other[0, :10], wanted)
    for row, length in enumerate((3, 5, 2)):
        alone = replace(padded(), attention_mask=None, size=1, longest=length, input_ids=torch.ones(1, length).long())
        scores = pooler([state[row : row + 1, :length] for state in states], alone)[0]
        torch.testing.assert_close(scores, whole[row] if pooler.whole else whole[row, :length])


@pytest.mark.parametrize("name", list(poolers()))
def test_states_may_go_as_soon_as_they_were_read(name):
    alive = weakref.WeakSet()

    class Seen:
        pass

    def walked():
        for _ in range(4):
            state = torch.randn(3, 5, 8)
            state.owner = Seen()  # lives as long as the tensor object
            alive.add(state.owner)
            assert len(alive) <= 2
            yield state
            del state

    with torch.no_grad():
        assert torch.isfinite(poolers()[name](walked(), padded())).all()
    assert not alive


def test_layers_above_the_last_one_read_do_not_run():
    encoder = run("pool_layers(layers=[0, 1])", small("bert", layers=3), toy_task("pair", 16)).encoder
    whole = run("pool_layers", small("bert", layers=3), toy_task("pair", 16)).encoder
    for layer in encoder.backbone.encoder.layer[1:]:
        layer.register_forward_pre_hook(lambda *_: pytest.fail("a layer ran for nothing"))
    scores_of(encoder, toy_task("pair", 16))
    assert count_macs(encoder, 16) < 0.6 * count_macs(whole, 16)


# In an encoder.


@every_kind
@every_form
def test_every_form_reads_every_kind_of_task_in_both_layouts(form, kind, tmp_path):
    task = toy_task(kind, 16)
    if kind in ("tag", "answer") and ("tokens" in form or "masked" in form):
        with pytest.raises(UserError, match="each token is read by itself; leave out tokens, masked and length"):
            run(form, small("bert", layers=2), task)
        return
    encoder = run(form, small("bert", layers=2), task).encoder
    batch = batch_of(encoder, task)
    with torch.no_grad():
        streamed, stored = encoder(batch), encoder.read(encoder.states(encoder.as_read(batch)), encoder.as_read(batch))
        torch.testing.assert_close(streamed, stored, atol=1e-5, rtol=1e-5)
        flat = encoder(batch_of(encoder, task, packed=True))
    whole, real = kind in ("classify", "regress"), batch.tokens()
    count = int(real.sum())
    torch.testing.assert_close(flat[:5] if whole else flat[0, :count], streamed if whole else streamed[real])
    for number in range(3):
        alone = scores_of(encoder, task, index=[number])[0]
        torch.testing.assert_close(alone, streamed[number] if whole else streamed[number, : len(alone)])
    assert count_macs(encoder, 16) > 0
    assert save_folder(encoder, tmp_path / "model") == "smallbert"
    loaded = load_folder(tmp_path / "model")
    assert is_same_state(loaded, encoder) and torch.equal(scores_of(loaded, task), streamed)


@every_form
def test_every_form_learns_on_a_frozen_backbone_alone(form):
    task = toy_task("tag" if "mix" in form else "pair", 16)
    before = run("head", small("bert", layers=2), task).encoder
    after = run(f"{form} + {FROZEN}", before, task).encoder
    drawn_only = run(form, before, task).encoder
    for name, tensor in state_of(after).items():
        if name.startswith("backbone."):
            assert torch.equal(tensor, before.state_dict()[name])
        else:
            assert not torch.equal(tensor, drawn_only.state_dict()[name]), name
    assert list(after.heads) == ["task"]


@pytest.mark.parametrize(("form", "kind"), [("adapter", "tag"), ("attention", "classify"), ("mix", "answer")])
def test_every_kind_of_pooler_comes_to_a_card(form, kind, tmp_path):
    start, task = Start(small("bert", layers=1), "small", "small"), toy_task(kind, 8)
    recipe = f"pool_layers({form!r}, detach=True) + finetune(epochs=1)"
    card = make_one(recipe, start, task, 0, tmp_path, kind="machinery check", device="cpu", seconds=None)
    assert card["status"] == "ok" and card["macs"]["value"] > 0 and card["parameters"]["head"] > 0
    assert card["trained"]["plain_head"].keys() == card["scores"].keys()


def test_counting_leaves_gradients_as_they_were():
    encoder = run("pool_layers('attention')", small("bert", layers=1), toy_task("pair", 16)).encoder
    encoder.backbone.requires_grad_(False)
    before = {name: one.requires_grad for name, one in encoder.named_parameters()}
    assert count_macs(encoder, 16) > 0
    assert {name: one.requires_grad for name, one in encoder.named_parameters()} == before


def test_gradients_reach_the_encoder_unless_it_is_frozen():
    task = toy_task("pair", 16)
    before = run("head", small("bert", layers=2), task).encoder
    after = run(f"pool_layers + {SHORT}", before, task).encoder
    assert not is_same_state(after.backbone, before.backbone)


@pytest.mark.parametrize("form", ["", "'mix', ", "'attention', lr=0.1, ", "tokens='mean', "])
@pytest.mark.parametrize("kind", ["pair", "answer"])
def test_a_stopped_gradient_leaves_plain_training_as_it_is_to_the_bit(form, kind):
    task, base = toy_task(kind, 32), small("bert", layers=2)
    if kind == "answer":  # each token is read by itself
        form = form.replace("tokens='mean'", "norm='feature'")
    plain = run("finetune(epochs=2, batch=8, lr=0.001, clip=0.01)", base, task).encoder
    both = run(f"pool_layers({form}detach=True) + finetune(epochs=2, batch=8, lr=0.001, clip=0.01)", base, task).encoder
    mine, theirs = state_of(with_plain_head(both)), state_of(plain)
    assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())
    assert torch.equal(scores_of(with_plain_head(both), task), scores_of(plain, task))
    start = run(f"pool_layers({form}dropout=0.1)", base, task).encoder
    assert not torch.equal(both.head.out.weight, start.head.out.weight)  # while the pooler has learned
    assert not torch.equal(scores_of(both, task), scores_of(plain, task))


def gradients(recipe, encoder, task):
    phase = phase_of(recipe, encoder, task)
    phase.begin_training()
    torch.manual_seed(3)
    take_step(phase, {"student": batch_of(phase.encoder, task, split="train")})
    return {name: one.grad for name, one in phase.encoder.named_parameters()}


def test_beside_the_plain_head_both_teach_the_encoder():
    task, base = toy_task("pair", 16), run("head", small("bert", layers=2), toy_task("pair", 16)).encoder
    plain, stopped, shared = (
        gradients(f"{recipe}train(batch=8, clip=0.0)", base, task)
        for recipe in ("", "pool_layers(detach=True) + ", "pool_layers(beside=True) + ")
    )
    for name, gradient in plain.items():
        other = name.replace("heads.task", f"heads.{PLAIN}")
        if gradient is not None:
            assert torch.equal(stopped[other], gradient), name
            assert name.startswith("heads.") or not torch.equal(shared[name], gradient), name
    assert stopped["heads.task.out.weight"].abs().sum() > 0
    torch.testing.assert_close(stopped["heads.task.out.weight"], shared["heads.task.out.weight"])


def test_a_pooler_with_a_stopped_gradient_is_clipped_by_its_own_norm():
    phase = phase_of("pool_layers(detach=True) + train(clip=0.01)", small("bert", layers=1), toy_task("pair", 16))
    for one in phase.encoder.parameters():
        one.grad = torch.full_like(one, 2.0)
    pooler = list(phase.encoder.head.parameters())
    rest = [one for one in phase.encoder.parameters() if not any(one is own for own in pooler)]
    _clip(phase.optimiser, rest, pooler, 0.01)
    for group in (pooler, rest):
        wanted = 0.01 / sum(one.numel() for one in group) ** 0.5
        for one in group:
            torch.testing.assert_close(one.grad / phase.optimiser.grad_scale, torch.full_like(one, wanted))


def test_a_step_clips_a_pooler_with_a_stopped_gradient_apart(monkeypatch):
    seen = []
    monkeypatch.setattr("smallbert.training.loop._clip", lambda optimiser, *lists: seen.append(lists))
    run("pool_layers(detach=True) + train(epochs=1, batch=16, clip=0.5)", small("bert"), toy_task("pair", 16))
    ((joint, apart, most),) = seen
    assert most == 0.5 and not {*joint} & {*apart}
    assert sum(one.numel() for one in apart) == count(
        run("pool_layers", small("bert"), toy_task("pair", 16)).encoder.head
    )


def test_a_pooler_beside_a_head_learns_at_a_rate_of_its_own():
    task = toy_task("pair", 16)
    for form, rates in {
        "pool_layers": {1e-4},
        "pool_layers(lr=0.5)": {0.5},
        "pool_layers(detach=True)": {1e-3},
        "pool_layers('mix', detach=True)": {1e-2, 1e-3},
    }.items():
        phase = phase_of(f"{form} + train(lr=1e-4)", small("bert"), task)
        rate = {id(p): g["lr"] for g in phase.optimiser.param_groups for p in g["params"]}
        assert {rate[id(one)] for one in phase.encoder.head.parameters()} == rates, form
        assert {rate[id(one)] for one in phase.encoder.backbone.parameters()} == {1e-4}


def test_a_second_head_is_saved_and_goes_when_another_head_comes(tmp_path):
    task = toy_task("pair", 16)
    both = run(f"pool_layers(detach=True) + {SHORT}", small("bert", layers=2), task).encoder
    save_folder(both, tmp_path / "model")
    loaded = load_folder(tmp_path / "model")
    assert list(loaded.heads) == ["task", PLAIN] and is_same_state(loaded, both)
    for later in ("head", "pool_layers"):
        assert list(run(later, loaded, task).encoder.heads) == ["task"]


def test_what_reads_padding_sees_the_same_of_it_in_any_company():
    task = toy_task("pair", 16)
    encoder = run("pool_layers(masked=False, length=40)", small("bert", layers=2), task).encoder
    batch = batch_of(encoder, task)
    stretched = pad_to(batch, 40, 0)
    assert stretched.input_ids.shape == (5, 40) and int(stretched.attention_mask.sum()) == int(batch.tokens().sum())
    states = torch.stack(encoder.states(stretched).hidden, 1)  # (texts, layers, 40, size), padding and all
    flat = functional.gelu(encoder.head.project.linear(states)).reshape(5, -1)
    torch.testing.assert_close(encoder(batch), encoder.head.out(flat), atol=1e-5, rtol=1e-5)
    other = pad_to(batch_of(encoder, task, packed=True, slots=6), 40, 0)
    for name in ("input_ids", "token_type_ids", "attention_mask", "position_ids"):
        assert torch.equal(getattr(other, name)[:5], getattr(stretched, name)), name
    masked = run("pool_layers(length=40)", small("bert", layers=2), task).encoder
    assert not torch.allclose(scores_of(masked, task), scores_of(encoder, task))  # the padding does matter


@pytest.mark.parametrize("packed", [False, True])
def test_a_teacher_that_reads_padding_scores_as_it_does_alone(packed):
    """And what it tells of its layers stands where the tokens of the batch do."""
    task = toy_task("pair", 16)
    teacher = run("pool_layers(masked=False, length=40)", small("bert", layers=2), task).encoder
    batch = batch_of(teacher, task, packed=packed)
    for wanted in ({}, {"hidden": {0, 2}, "q": {1}}):
        seen = teacher.look(batch, wanted)
        torch.testing.assert_close(seen.scores, teacher(batch))
        plain = teacher.look(batch, wanted, scores=False).taps if wanted else {}
        assert all(torch.equal(seen.taps[role][at], plain[role][at]) for role in wanted for at in wanted[role])
    recipe = (
        "mark('teacher') | head | align('hidden', teacher='teacher') + distill('teacher') + train(epochs=1, batch=8)"
    )
    assert not run(recipe, teacher, task, judge=False).diverged


# What they cost, and what can be cut.


def count(module: nn.Module) -> int:
    return sum(one.numel() for one in module.parameters())


@pytest.mark.parametrize(
    ("length", "width", "classes", "wanted"),
    [(128, 128, 2, 524_418), (250, 8, 2, 58_154), (128, 16, 2, 65_554), (128, 32, 2, 131_106), (121, 32, 2, 125_282)],
)
def test_parameters_are_the_papers(length, width, classes, wanted):
    made = AdapterPooler("classify", classes, [], list(range(13)), Projection(768, width), "positions", length)
    assert count(made) == wanted == 769 * width + 13 * length * width * classes + classes
    spans = AdapterPooler("answer", 2, [], list(range(13)), Projection(768, width))
    assert count(spans) == 769 * width + 26 * width + 2


def test_the_card_counts_what_runs():
    task = toy_task("pair", 16)
    base = run("head", small("bert", layers=3), task).encoder
    plain = count_parameters(base)
    assert plain["running"] == plain["total"] and plain["head"] == count(base.head)
    encoder = run(f"pool_layers(width=4, detach=True, layers=[0, 2]) + {SHORT}", base, task).encoder
    found = count_parameters(encoder)
    size, length = encoder.width, task.length
    assert found["head"] == (size + 1) * 4 + 2 * length * 4 * 3 + 3
    idle = count(encoder.heads[PLAIN]) + count(encoder.backbone.encoder.layer[2])
    assert found["total"] == plain["total"] + found["head"] and found["running"] == found["total"] - idle
    cut = count_parameters(run("cut_to_mixture", encoder, task).encoder)
    assert cut["running"] == found["running"] == cut["total"] == found["total"] - idle


@pytest.mark.parametrize("cut", ["cut_to_mixture", "drop_layers(2)"])
def test_a_plain_head_goes_with_the_layers_it_stood_on(cut, tmp_path):
    task, base = toy_task("pair", 16), small("bert", layers=3)
    recipe = f"pool_layers(detach=True, layers=[0, 1]) + {SHORT}"
    card = make_one(
        f"{recipe} | {cut}", Start(base, "tiny", "0"), task, 0, tmp_path, kind="machinery check", seconds=None
    )
    assert "plain_head" not in card["trained"]
    assert any("the plain head" in note and "was removed with the layers" in note for note in card["trained"]["notes"])
    (folder,) = (tmp_path / "models").iterdir()
    assert list(load_folder(folder).heads) == ["task"]
    whole = run(f"pool_layers(detach=True) + {SHORT} | cut_to_mixture", base, task)
    assert list(whole.encoder.heads) == ["task", PLAIN] and not any("was removed with" in note for note in whole.notes)


@pytest.mark.parametrize("form", ["layers=[0, 1]", "'attention', layers=[1]", "'mix', layers=[0, 1]", "layers=[0]"])
@pytest.mark.parametrize("kin", ["bert", "albert", "mpnet", "modernbert"])
def test_cutting_what_is_not_read_changes_nothing(form, kin):
    task = toy_task("pair", 16)
    whole = run(f"pool_layers({form}) + {SHORT}", small(kin, layers=3), task).encoder
    cut = run("cut_to_mixture(1.0)", whole, task).encoder
    assert len(cut.order) == 1 and cut.head.reads == whole.head.reads
    if kin != "modernbert" or form == "layers=[0]":  # its last layer's output, and no other, goes through a norm
        assert torch.equal(scores_of(cut, task), scores_of(whole, task))


def test_dropping_layers_forgets_their_weights():
    task = toy_task("pair", 16)
    whole = run("pool_layers(width=4)", small("bert", layers=3), task).encoder
    cut = run("drop_layers(2)", whole, task).encoder
    kept = [0, *(place + 1 for place in cut.history[-1]["plan"]["layers"])]
    weights = whole.head.out.weight.unflatten(1, (4, -1))
    assert torch.equal(cut.head.out.weight, weights[:, kept].flatten(1)) and cut.head.reads == [0, 1, 2]
    states, batch = whole.states(batch_of(whole, task)).hidden, batch_of(whole, task)
    # A new projection has no bias, so that states of zeros add nothing to the scores.
    zeroed = [state if number in kept else torch.zeros_like(state) for number, state in enumerate(states)]
    torch.testing.assert_close(cut.head([states[number] for number in kept], batch), whole.head(zeroed, batch))
    with pytest.raises(UserError, match="none of them would be left"):
        run("pool_layers(layers=[1]) | drop_layers(1, which='last')", small("bert", layers=3), task)


@pytest.mark.slow  # test_export.py has graphs for every day
@pytest.mark.parametrize("form", ["pool_layers('attention')", "pool_layers", "pool_layers(masked=False)"])
def test_onnx(form, tmp_path):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    from smallbert.export import export_onnx

    encoder = run(form, small("bert", layers=2), toy_task("pair", 16)).encoder
    save_folder(encoder, tmp_path / "model")
    found = export_onnx(tmp_path / "model", tmp_path / "onnx")
    assert found["checked"] >= 64 and found["difference"] < 1e-4


# The paper's recipes and controls.

CONTROLS = {
    "own head": "finetune(epochs=1, batch=8)",
    "adapter": "finetune(epochs=1, batch=8) | pool_layers(kind='adapter', width=16) + " + FROZEN,
    "head retrained": f"finetune(epochs=1, batch=8) | {FROZEN}",
    "mix": f"finetune(epochs=1, batch=8) | pool_layers(kind='mix') + {FROZEN}",
    "two epochs": "finetune(epochs=2, batch=8)",
    "in parallel": "pool_layers(detach=True) + finetune(epochs=1, batch=8)",
}


@pytest.mark.parametrize("name", list(CONTROLS))
def test_the_papers_controls_are_recipes_with_cards(name, tmp_path):
    task = toy_task("pair", 16)
    start = Start(small("bert", layers=2), "tiny", "0")
    card = make_one(CONTROLS[name], start, task, 0, tmp_path, kind="machinery check", device="cpu", seconds=None)
    assert card["status"] == "ok" and 0 <= card["scores"]["accuracy"]["value"] <= 100
    assert card["parameters"]["head"] > 0 and card["bytes"]["head"] >= 4 * card["parameters"]["head"]
    assert ("plain_head" in card["trained"]) == (name == "in parallel")
    if name == "in parallel":
        own = make_one(
            CONTROLS["own head"], start, task, 0, tmp_path, kind="machinery check", device="cpu", seconds=None
        )
        assert card["trained"]["plain_head"] == own["scores"]
        assert card["parameters"]["running"] < card["parameters"]["total"]
    json.dumps(card, allow_nan=False)


def test_answers_are_learned_from_a_frozen_encoder():
    """A tiny reading task end to end: the pooler finds answers that the head of the same encoder does not."""
    task = toy_task("answer", 64)
    before = run("finetune(epochs=1, batch=16, lr=0.001)", small("bert", layers=2), task).encoder
    after = run("pool_layers + train(epochs=20, batch=8, lr=0.01, freeze='backbone')", before, task).encoder
    assert accuracy(after, task) > accuracy(before, task) + 10


@pytest.mark.parametrize("epochs", [0.1, 0.3, 0.75, 1.5])
def test_a_fraction_of_an_epoch_is_that_share_of_its_steps(epochs):
    task = toy_task("pair", 48)
    outcome = run(f"finetune(epochs={epochs}, batch=8)", small("bert"), task)
    assert outcome.steps == max(1, round(epochs * 6)) and outcome.epochs == epochs


# What is refused.


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ("pool_layers(width=0)", "1 or more"),
        ("pool_layers(dropout=1.0)", "share"),
        ("pool_layers(lr=0.0)", "more than 0"),
        ("pool_layers('mix', tokens='mean')", "for kind='adapter'"),
        ("pool_layers('mix', masked=False)", "no padding"),
        ("pool_layers('mix', width=4)", "leave width=4 out"),
        ("pool_layers('attention', length=9)", "leave it out"),
        ("pool_layers(tokens='mean', length=9)", "leave it out"),
        ("pool_layers(detach=True, beside=True) + finetune", "write one"),
        ("finetune(dropout=2)", "finetune: dropout is a share from 0 to below 1, not 2.0"),
        ("pool_layers(layers=[9])", "no hidden state 9"),
        ("pool_layers(layers=[])", "layers is empty"),
        ("pool_layers(length=1000)", "at most"),
        ("pool_layers(detach=True)", "same phase"),
        ("pool_layers + pool_layers(width=8) + train", "has one pooler, but pool_layers.* and pool_layers"),
        ("mix_layers | pool_layers", "already reads a mixture"),
        ("pool_layers | mix_layers", "is a pooler"),
        ("pool_layers | gate_layers", "is a pooler"),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence(recipe, says):
    with pytest.raises(UserError, match=says):
        run(recipe, small("bert"), toy_task("pair", 16))


def test_an_encoder_without_a_head_is_refused():
    with pytest.raises(UserError, match="no task head"):
        run("pool_layers", small("bert"))


def test_stored_states_hold_no_padding():
    batch = replace(padded(), hidden=torch.zeros(2, 3, 5, 8))
    with pytest.raises(UserError, match="masked=True"):
        pad_to(batch, 8, 0)
