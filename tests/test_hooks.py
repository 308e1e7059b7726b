"""Toy versions of the odd techniques, so that the hooks of a method carry everything the literature needs."""

from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional
from toys import batch_of, check_refused, is_same_state, run, scores_of, small, state_of, stream_of, toy_task

from smallbert.errors import UserError
from smallbert.methods import METHODS, Method
from smallbert.model.anatomy import linears
from smallbert.model.folders import load_folder, save_folder
from smallbert.model.heads import losses
from smallbert.recipes.recipe import Recipe
from smallbert.texts.data import Stream
from smallbert.training.masks import maskable
from smallbert.training.schedule import Schedule, warmup_then_linear

TASK = toy_task("classify", 24)
WORDS = "backbone.embeddings.word_embeddings.weight"
PLAIN = "train(epochs=2, batch=8, lr=0.01, weight_decay=0.0, dropout=0.0, clip=0.0)"  # six steps


@pytest.fixture(autouse=True)
def own_methods():
    """Methods that a test defines are forgotten after it."""
    with METHODS.for_now():
        yield


@pytest.fixture(scope="module")
def encoder():
    return run("head", small(), TASK).encoder


@pytest.fixture(scope="module")
def trained(encoder):
    return run(f"{PLAIN}", encoder, TASK).encoder


# What happens around a step.


def test_proximal_step_with_the_scheduled_rate(encoder):
    class SoftThreshold(Method):
        """Shrink every word vector towards zero after each step, by the step's own learning rate."""

        trains: ClassVar[bool] = True
        strength: float = 2.0

        def after_step(self, phase: Any) -> None:
            weight = phase.encoder.get_parameter(WORDS)
            with torch.no_grad():
                weight.copy_(weight.sign() * (weight.abs() - self.strength * phase.rate).clamp(min=0))

    result = run(f"soft_threshold + {PLAIN}", encoder, TASK).encoder
    used = set(stream_of(encoder, TASK, "train").views["student"].ids.tolist())
    unused = [number for number in range(100) if number not in used]
    before = encoder.get_parameter(WORDS)[unused]
    shrunk = 2.0 * sum(0.01 * warmup_then_linear((step + 1) / 7, 0.1) for step in range(6))
    assert 0 < shrunk < 0.2 and len(unused) > 10  # tokens that never occur: only the hook moves them
    wanted = before.sign() * (before.abs() - shrunk).clamp(min=0)
    torch.testing.assert_close(result.get_parameter(WORDS)[unused], wanted, atol=1e-6, rtol=1e-5)
    assert (wanted == 0).any() and (wanted != 0).any()


class _Ascent(Method):
    trains: ClassVar[bool] = True
    size: float = 0.05

    def around_step(self) -> Any:
        def around(phase: Any, batches: Any, take: Any) -> Any:
            weight = phase.encoder.get_parameter(WORDS)
            (slope,) = torch.autograd.grad(phase.loss(batches), weight)
            uphill = self.size * slope / slope.norm()
            with torch.no_grad():
                weight.add_(uphill)
            loss = take(phase, batches)
            with torch.no_grad():
                weight.sub_(uphill)
            return loss

        return around


def test_inner_ascent_owns_the_step(encoder):
    class Ascent(_Ascent):
        """Take each step's gradient from where the loss is higher nearby."""

    # Two whole-batch steps against the same written out by hand.
    settings = "train(epochs=2, batch=24, lr=0.01, warmup=0.0, weight_decay=0.0, dropout=0.0, clip=0.0)"
    result = run(f"ascent + {settings}", encoder, TASK).encoder
    mine = encoder.copy().eval()
    optimiser = torch.optim.AdamW(mine.parameters(), lr=0.01, weight_decay=0.0)
    batch, words = batch_of(mine, TASK, range(24), "train"), mine.get_parameter(WORDS)
    for factor in (2 / 3, 1 / 3):
        (slope,) = torch.autograd.grad(functional.cross_entropy(mine(batch), batch.labels), words)
        uphill = 0.05 * slope / slope.norm()
        words.data.add_(uphill)
        optimiser.zero_grad()
        functional.cross_entropy(mine(batch), batch.labels).backward()
        words.data.sub_(uphill)
        optimiser.param_groups[0]["lr"] = 0.01 * factor
        optimiser.step()
    for name, tensor in state_of(mine).items():
        torch.testing.assert_close(result.state_dict()[name], tensor, atol=2e-5, rtol=1e-4)
    assert not is_same_state(result, run(settings, encoder, TASK).encoder)


def test_a_step_has_one_owner(encoder):
    class Ascent(_Ascent):
        """One."""

    class OtherAscent(_Ascent):
        """And another."""

    with pytest.raises(UserError, match="both wrap the training step"):
        run(f"ascent + other_ascent + {PLAIN}", encoder, TASK)


def test_gradients_can_be_changed_before_the_update(encoder):
    class FreezeWords(Method):
        """Let the word vectors stay."""

        def after_backward(self, phase: Any) -> None:
            phase.encoder.get_parameter(WORDS).grad.zero_()

    result = run(f"freeze_words + {PLAIN}", encoder, TASK).encoder
    assert torch.equal(result.get_parameter(WORDS), encoder.get_parameter(WORDS))
    assert not is_same_state(result, encoder)


def test_mid_training_statistics_disturb_nothing(encoder):
    seen = []

    class Fisher(Method):
        """Add up squared gradients over whole batches of the phase's own data, every two steps."""

        def every(self) -> int:
            return 2

        def attach(self, phase: Any) -> None:
            store = phase.train_module("fisher", nn.Module())
            store.register_buffer("total", torch.zeros_like(phase.encoder.get_parameter(WORDS)))

        def look(self, phase: Any) -> None:
            batch = batch_of(phase.encoder, TASK, range(len(phase.stream)), "train")
            phase.loss({"student": batch}).backward()
            phase.modules["fisher"].total += phase.encoder.get_parameter(WORDS).grad ** 2
            seen.append((phase.step, float(phase.modules["fisher"].total.sum())))

    result = run(f"fisher + {PLAIN}", encoder, TASK).encoder
    assert [step for step, _ in seen] == [2, 4, 6]
    assert 0 < seen[0][1] < seen[1][1] < seen[2][1]
    assert is_same_state(result, run(PLAIN, encoder, TASK).encoder)  # the looks left no trace
    assert not any("fisher" in name for name in result.state_dict())


# Extra modules, teachers, loss terms and their weights.


def test_a_trained_copy_of_the_teacher(trained):
    found: dict[str, Any] = {}

    class LearningTeacher(Method):
        """A copy of the teacher learns beside the student, which is pulled towards it."""

        trains: ClassVar[bool] = True

        def attach(self, phase: Any) -> None:
            found["teacher"] = phase.teacher("latest")
            found["before"] = state_of(found["teacher"])
            copy = found["teacher"].copy().requires_grad_(True)
            found["copy"] = phase.train_module("teacher copy", copy, lr=0.005)

        def loss(self, step: Any) -> dict[str, Any]:
            scores = found["copy"](step.batch)
            pull = functional.mse_loss(step.scores, scores.detach(), reduction="none").mean(-1)
            own = losses(found["copy"].head, scores, step.batch)
            return {"pull": step.mean(pull), "own": step.mean(own)}

    result = run(f"learning_teacher + {PLAIN}", trained, TASK).encoder
    assert not is_same_state(found["copy"], trained) and not is_same_state(result, trained)
    now = state_of(found["teacher"])
    assert all(torch.equal(now[name], found["before"][name]) for name in now)
    assert not any("copy" in name for name in result.state_dict())


def test_own_rate_and_weight_of_an_extra_module(encoder):
    groups: list[dict[str, Any]] = []

    class Projection(Method):
        """A trained projection with a rate of its own."""

        def attach(self, phase: Any) -> None:
            phase.train_module("projection", nn.Linear(16, 16), lr=0.03)

        def loss(self, step: Any) -> dict[str, Any]:
            projected = step.phase.modules["projection"](step.states.last)
            return {"projection": step.mean(step.batch.mean(projected.square()).mean(-1))}

        def every(self) -> int:
            return 3

        def look(self, phase: Any) -> None:
            groups.extend(dict(group) for group in phase.optimiser.param_groups)

    run(f"projection + {PLAIN}", encoder, TASK)
    own = [group for group in groups if group["base_lr"] == 0.03]
    assert len(own) == 2 and {parameter.shape for parameter in own[0]["params"]} == {(16, 16), (16,)}
    assert own[0]["weight_decay"] == 0.0
    # The schedule turns all rates together: at step 3 of 6 the factor is that of 3 / 7.
    assert own[0]["lr"] == pytest.approx(0.03 * warmup_then_linear(3 / 7, 0.1))


def test_loss_weights_follow_schedules(trained):
    seen: list[tuple[float, float, float]] = []

    class Fading(Method):
        """The task's own loss fades out while another fades in."""

        trains: ClassVar[bool] = True

        def weights(self, phase: Any) -> dict[str, Any]:
            return {"task": Schedule(1.0, 0.0), "size": Schedule(0.0, 2.0, stairs=2), "half": 0.5}

        def loss(self, step: Any) -> dict[str, Any]:
            size = step.penalty(step.phase.encoder.get_parameter(WORDS).square().mean())
            task = step.mean(losses(step.phase.encoder.head, step.scores, step.batch))
            return {"size": size, "half": task}

        def around_step(self) -> Any:
            def around(phase: Any, batches: Any, take: Any) -> Any:
                with torch.no_grad():
                    task = losses(phase.encoder.head, phase.look_at(batches).scores, batches["student"]).mean()
                    size = phase.encoder.get_parameter(WORDS).square().mean()
                seen.append((float(task), float(size), float(take(phase, batches))))
                return torch.tensor(seen[-1][-1])

            return around

    run(f"fading + {PLAIN}", trained, TASK)
    assert len(seen) == 6
    for step, (task, size, total) in enumerate(seen):
        weight, stairs = 1 - step / 6, 0.0 if step < 3 else 1.0
        assert total == pytest.approx(weight * task + stairs * size + 0.5 * task, abs=1e-5)


def test_a_dial_that_weighs_a_loss_belongs_to_nobody_else(trained):
    class Heavy(Method):
        """Turns a dial that is taken."""

        def attach(self, phase: Any) -> None:
            phase.dial("weight of task", 3.0)

    check_refused(f"heavy + distill + {PLAIN}", trained, TASK, "rename it")


def test_weights_of_one_term_multiply_and_one_term_has_one_author(trained):
    seen: list[float] = []

    class Half(Method):
        """The task counts half."""

        def weights(self, phase: Any) -> dict[str, Any]:
            return {"task": 0.5}

        def loss(self, step: Any) -> dict[str, Any]:
            return {"nothing": step.scores.sum() * 0}

        def after_step(self, phase: Any) -> None:
            seen.append(float(phase.dials["weight of task"]))

    run(f"half + distill(alpha=0.6) + {PLAIN}", trained, TASK)
    assert seen == pytest.approx([0.2] * 6)

    class Nothing(Method):
        """Uses a name that is taken."""

        def loss(self, step: Any) -> dict[str, Any]:
            return {"nothing": step.scores.sum() * 0}

    with pytest.raises(UserError, match="nothing"):
        run(f"half + nothing + {PLAIN}", trained, TASK)


def test_a_phase_without_anything_to_learn_says_so(trained):
    class Bare(Method):
        """Texts without labels."""

        def data(self, phase: Any) -> Any:
            stream = stream_of(phase.encoder, TASK, "dev")
            return Stream(stream.views, None, "classify")

    with pytest.raises(UserError, match="nothing to learn from"):
        run(f"bare + {PLAIN}", trained, TASK)
    assert not is_same_state(run(f"bare + distill + {PLAIN}", trained, TASK).encoder, trained)


# Data, routes, transforms, ties.


def test_a_phase_can_bring_its_own_data(encoder):
    class Flipped(Method):
        """The same texts with the other label, few of them."""

        def data(self, phase: Any) -> Any:
            stream = stream_of(phase.encoder, TASK, "dev")
            return Stream(stream.views, 1 - stream.labels, "classify", notes=["flipped"])

    class Again(Flipped):
        """A second one."""

    settings = "train(epochs=30, batch=12, lr=0.01, dropout=0.0)"
    outcome = run(f"flipped + {settings}", encoder, TASK, judge=False)
    assert outcome.steps == 30 and "flipped" in outcome.notes
    guess = scores_of(outcome.encoder, TASK, index=range(12)).argmax(-1)
    assert (guess == 1 - torch.tensor(TASK.split("dev").labels)).float().mean() > 0.9
    with pytest.raises(UserError, match="both bring data"):
        run(f"flipped + again + {settings}", encoder, TASK)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_route_skips_layers_while_training(encoder, share):
    class SkipLayers(Method):
        """Leave out layers at random while training."""

        share: float = 0.5

        def attach(self, phase: Any) -> None:
            def route(place: int, hidden: Any, layer: Any) -> Any:
                return hidden if torch.rand(()) < self.share else layer(hidden)

            phase.route = route

    class SkipAgain(SkipLayers):
        """Another route."""

    recipe = f"skip_layers({share}) + {PLAIN}"
    result, plain = run(recipe, encoder, TASK).encoder, run(PLAIN, encoder, TASK).encoder
    assert is_same_state(result, plain) == (share == 0)
    moved = [
        not torch.equal(tensor, encoder.state_dict()[name])
        for name, tensor in result.state_dict().items()
        if "encoder.layer" in name
    ]
    assert any(moved) == (share < 1)  # what is never run is never trained
    assert is_same_state(result, run(recipe, encoder, TASK).encoder)
    states = result.states(batch_of(result, TASK))
    assert not torch.equal(states.hidden[0], states.hidden[1])  # the route is gone when the phase is over
    with pytest.raises(UserError, match="route"):
        run(f"skip_layers + skip_again + {PLAIN}", encoder, TASK)


@pytest.mark.parametrize("kin", ["bert", "albert", "deberta-v2"])
def test_a_route_may_skip_a_tapped_layer(tiny, kin):
    encoder = tiny(kin)
    batch = batch_of(encoder, TASK)
    whole = encoder.states(batch, taps=("k",))
    cut = encoder.states(batch, taps=("k",), route=lambda place, hidden, layer: hidden if place == 1 else layer(hidden))
    assert len(whole.taps["k"]) == 4 and len(cut.taps["k"]) == 3
    assert torch.equal(whole.taps["k"][0], cut.taps["k"][0])
    assert all(tap.shape == whole.last.shape for tap in cut.taps["k"].values())


class _Transforms(Method):
    def change(self, weight: Any) -> Any:
        return weight

    def attach(self, phase: Any) -> None:
        phase.transform([WORDS], lambda weights: {n: self.change(w) for n, w in weights.items()}, self.stage)


@pytest.mark.parametrize("typed", ["plus_one + times_two", "times_two + plus_one"])
def test_transforms_stack_by_stage_however_they_are_typed(encoder, typed):
    class TimesTwo(_Transforms):
        """Comes last."""

        stage: ClassVar[int] = 40
        change = lambda self, weight: weight * 2  # noqa: E731

    class PlusOne(_Transforms):
        """Comes first."""

        stage: ClassVar[int] = 20
        change = lambda self, weight: weight + 1  # noqa: E731

    result = run(typed, encoder, TASK).encoder
    assert torch.equal(result.get_parameter(WORDS), (encoder.get_parameter(WORDS) + 1) * 2)
    assert [entry["step"] for entry in result.history[-2:]] == ["plus_one", "times_two"]


def test_what_is_trained_is_what_is_seen(encoder):
    class Doubled(_Transforms):
        """The model sees every word vector doubled."""

        trains: ClassVar[bool] = True
        change = lambda self, weight: weight * 2  # noqa: E731

    halved = encoder.copy()
    halved.get_parameter(WORDS).data.div_(2)
    settings = "train(epochs=1, batch=24, lr=1e-9, dropout=0.0)"
    result = run(f"doubled + {settings}", halved, TASK, judge=False).encoder
    torch.testing.assert_close(result.get_parameter(WORDS), encoder.get_parameter(WORDS), atol=1e-6, rtol=0)


def test_a_method_may_stand_for_a_recipe(encoder):
    class Shrink(Method):
        """Two phases."""

        keep: int = 1

        def expand(self) -> Any:
            return Recipe(f"drop_layers({self.keep}) | {PLAIN}")

    result = run("shrink | quantize", encoder, TASK).encoder
    names = [entry["step"].split("(")[0] for entry in result.history]
    assert names == ["head", "drop_layers", "train", "quantize"]
    assert is_same_state(result, run(f"drop_layers(1) | {PLAIN} | quantize", encoder, TASK).encoder)
    repeated = run(f"repeat(3, train(epochs=1, batch=24)) | repeat(2, mark('a') | {PLAIN})", encoder, TASK)
    assert [entry["step"].split("(")[0] for entry in repeated.encoder.history] == [
        *("head", "train", "train", "train"),
        *("mark", "train", "mark", "train"),
    ]
    assert repeated.steps == 3 + 12


def test_rewinding_goes_back_but_keeps_zeros(encoder):
    tuned = run(f"mark('start') | {PLAIN} | rewind('start')", encoder, TASK).encoder
    for name, tensor in encoder.backbone.state_dict().items():
        assert torch.equal(tensor, tuned.backbone.state_dict()[name])
    assert not torch.equal(tuned.head.out.weight, encoder.head.out.weight)  # the head is kept as it was trained
    ticket = run(f"mark('start') | magnitude(0.5) + {PLAIN} | rewind('start')", encoder, TASK).encoder
    pruned = run(f"mark('start') | magnitude(0.5) + {PLAIN}", encoder, TASK).encoder
    for name in maskable(encoder):
        mask = pruned.get_parameter(name) != 0
        assert mask.sum() == mask.numel() // 2
        assert torch.equal(ticket.get_parameter(name), encoder.get_parameter(name) * mask)
    retrained = run(f"mark('start') | magnitude(0.5) + {PLAIN} | rewind('start') | {PLAIN}", encoder, TASK).encoder
    assert all(
        torch.equal(retrained.get_parameter(name) == 0, ticket.get_parameter(name) == 0) for name in maskable(encoder)
    )


@pytest.mark.parametrize("between", ["drop_layers(1)", "quantize"])
def test_rewinding_refuses_another_shape(encoder, between):
    with pytest.raises(UserError, match="changed shape since 'start'"):
        run(f"mark('start') | {between} | rewind('start')", encoder, TASK)
    with pytest.raises(UserError, match="nothing was marked 'end'"):
        run("mark('start') | rewind('end')", encoder, TASK)


def tie_method():
    class Tie(Method):
        """Two layers share their first matrix."""

        def build(self, encoder: Any, plan: dict[str, Any]) -> None:
            first, second = encoder.backbone.encoder.layer[:2]
            second.attention.self.query = first.attention.self.query


def test_tied_weights_are_visited_once_and_stay_tied(encoder, tmp_path):
    tie_method()

    def tied(one: Any) -> bool:
        first, second = one.backbone.encoder.layer[:2]
        return first.attention.self.query is second.attention.self.query

    plain = run("tie", encoder, TASK).encoder
    assert tied(plain) and not tied(encoder)
    assert len(list(linears(plain.backbone))) == len(list(linears(encoder.backbone))) - 1 == 11
    assert len(maskable(plain)) == len(set(maskable(plain))) == 11
    for recipe in (f"tie | magnitude(0.5) + {PLAIN}", f"tie | movement(0.5) + {PLAIN} | {PLAIN}", "tie | quantize"):
        result = run(recipe, encoder, TASK).encoder
        assert tied(result)
        save_folder(result, tmp_path / "model")
        loaded = load_folder(tmp_path / "model")
        assert tied(loaded) and is_same_state(loaded, result)
        assert torch.equal(scores_of(loaded, TASK), scores_of(result, TASK))
    # Tied in the folder too: the shared matrix is written once.
    save_folder(plain, tmp_path / "plain")
    save_folder(encoder, tmp_path / "untied")
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("plain", "untied")]
    assert sizes[1] - sizes[0] > 16 * 16 * 4
    run("tie | drop_layers(1)", encoder, TASK)


def test_masked_tie_is_seen_masked_in_both_places(encoder):
    tie_method()
    result = run(f"tie | magnitude(0.5) + {PLAIN}", encoder, TASK).encoder
    second = result.backbone.encoder.layer[1].attention.self.query.weight
    assert (second == 0).sum() == second.numel() // 2


# A student that is no transformer.


@pytest.fixture
def bilstm():
    """A family of its own, known to transformers and to our tables for the length of a test."""
    from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from smallbert.model.anatomy import FAMILIES, Anatomy
    from smallbert.model.encoder import Encoder
    from smallbert.model.walk import WALKS, Style
    from smallbert.tiny import make_tokenizer

    class ToyConfig(PretrainedConfig):
        model_type = "toy-bilstm"

        def __init__(self, vocab_size: int = 100, hidden_size: int = 16, num_hidden_layers: int = 2, **rest: Any):
            self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
            super().__init__(**rest)

    class Layer(nn.Module):
        def __init__(self, width: int):
            super().__init__()
            self.lstm = nn.LSTM(width, width // 2, bidirectional=True, batch_first=True)

        def forward(self, hidden: Any, lengths: Any) -> Any:
            packed = nn.utils.rnn.pack_padded_sequence(hidden, lengths, batch_first=True, enforce_sorted=False)
            return nn.utils.rnn.pad_packed_sequence(
                self.lstm(packed)[0], batch_first=True, total_length=hidden.shape[1]
            )[0]

    class ToyModel(PreTrainedModel):
        config_class = ToyConfig

        def __init__(self, config: Any):
            super().__init__(config)
            self.embeddings = nn.ModuleDict({"words": nn.Embedding(config.vocab_size, config.hidden_size)})
            self.layers = nn.ModuleList(Layer(config.hidden_size) for _ in range(config.num_hidden_layers))
            self.post_init()

    def arguments(backbone: Any, batch: Any, hidden: Any) -> Any:
        mask = torch.ones_like(batch.input_ids) if batch.attention_mask is None else batch.attention_mask
        return lambda layer: {"lengths": mask.sum(1).cpu()}

    AutoConfig.register("toy-bilstm", ToyConfig)
    AutoModel.register(ToyConfig, ToyModel)
    FAMILIES["toy-bilstm"] = Anatomy(layers="layers", words="embeddings.words", style="toy", token_types=False)
    WALKS["toy"] = Style(lambda backbone, batch: backbone.embeddings["words"](batch.input_ids), arguments)
    try:
        torch.manual_seed(0)
        yield Encoder(ToyModel(ToyConfig()), make_tokenizer()).eval()
    finally:
        del FAMILIES["toy-bilstm"], WALKS["toy"]
        CONFIG_MAPPING._extra_content.pop("toy-bilstm")
        AutoModel._model_mapping._extra_content.pop(ToyConfig)


def test_a_student_need_not_be_a_transformer(bilstm, encoder, tmp_path):
    teacher = run("train(epochs=15, batch=8, lr=0.01)", encoder, TASK).encoder
    save_folder(teacher, tmp_path / "teacher")
    teach = f"distill(teacher={str(tmp_path / 'teacher')!r}, alpha=1.0) + train(epochs=20, batch=8, lr=0.02)"
    outcome = run(f"{teach} | drop_layers(1) | mix_layers | {PLAIN} | quantize", bilstm, TASK, judge=False)
    result = outcome.encoder
    assert result.family == "toy-bilstm" and not result.packable and len(result.order) == 1
    assert save_folder(result, tmp_path / "student") == "smallbert"
    assert torch.equal(scores_of(load_folder(tmp_path / "student"), TASK), scores_of(result, TASK))
    together = scores_of(result, TASK)
    torch.testing.assert_close(scores_of(result, TASK, index=[1])[0], together[1], atol=1e-5, rtol=1e-4)
    taught = run(teach, bilstm, TASK, judge=False).encoder
    guess = [scores_of(one, TASK, index=range(24), split="train").argmax(-1) for one in (taught, teacher)]
    assert 8 < guess[1].sum() < 16 and (guess[0] == guess[1]).float().mean() > 0.9  # it learned what the teacher says


def test_every_method_works_or_refuses_where_there_is_no_attention(bilstm, trained, tmp_path):
    save_folder(trained, tmp_path / "teacher")
    (tmp_path / "text.txt").write_text("the film was good and the story was bad")
    recipes = {
        "align": f"align('first', transform='linear', teacher={str(tmp_path / 'teacher')!r})",
        "augment": f"augment(2, 'delete') + distill(teacher={str(tmp_path / 'teacher')!r})",
        "cut_to_mixture": "mix_layers | cut_to_mixture(0.6)",
        "bottleneck": "bottleneck(layers=1, width=16, inner=8, heads=2, ffn=16, embed=4)",
        "distill": f"distill(teacher={str(tmp_path / 'teacher')!r})",
        "share_projections": f"share_projections(teacher={str(tmp_path / 'teacher')!r})",
        "student": "student(1)",
        "mark": "mark('a')",
        "pretrain": f"pretrain({str(tmp_path / 'text.txt')!r})",
        "repeat": "repeat(2, train(epochs=1))",
        "rewind": "mark('a') | rewind('a')",
        "unlabelled": f"unlabelled + distill(teacher={str(tmp_path / 'teacher')!r})",
    }
    refused = []
    for name in METHODS:
        try:
            result = run(recipes.get(name, name), bilstm, TASK, judge=False).encoder
        except UserError as error:
            refused.append(name)
            assert "toy-bilstm" in str(error)
            continue
        assert torch.isfinite(scores_of(result, TASK)).all()
        save_folder(result, tmp_path / name)
        assert torch.equal(scores_of(load_folder(tmp_path / name), TASK), scores_of(result, TASK))
    pruning = "magnitude movement soft_movement l0 smooth_movement second_order rpp prune lottery delete_information"
    refusing = {*pruning.split(), "sparse", "share_projections", "mixed_bits"}
    assert set(refused) == refusing  # an LSTM has no matrix in the anatomy table
    with pytest.raises(UserError, match="no part 'q'"):
        bilstm.states(batch_of(bilstm, TASK), taps=("q",))
