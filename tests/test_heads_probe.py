"""Head importance is the gradient of a gate, example by example; attention is what Hugging Face says it is."""

import copy
import json
import math

import numpy as np
import pytest
import torch
from torch.nn import functional
from toys import batch_of, run, small, snapshot, stream_of, toy_task

from smallbert.errors import RunError, UserError
from smallbert.measuring.evaluate import evaluate
from smallbert.model.anatomy import layers, part
from smallbert.model.encoder import HEAD
from smallbert.probing.attentions import SUMMARIES, add_up, attention_summaries, watched
from smallbert.probing.heads import example_losses, gate_slopes, gated, head_count, head_importance
from smallbert.report.heads import draw, figure_of, head_rows, head_table, layer_rows, layer_table, markdown, rank
from smallbert.tiny import make_encoder, make_tokenizer


def with_head(family="bert", kind="classify", **shape):
    """A tiny encoder with a head for a toy task, whose weights are large enough for losses to move."""
    made = run("head", small(family, **shape), toy_task(kind)).encoder
    with torch.no_grad():
        made.head.out.weight.mul_(30)
    return made


def numbers_of(found):
    return torch.tensor(found["importance"], dtype=torch.float64)


def hooks_of(encoder):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in encoder.modules())


# Importance


@pytest.mark.parametrize("family", ["bert", "albert"])
def test_slopes_are_what_a_small_step_of_each_gate_does_to_each_loss(family):
    """In double precision, gate by gate and example by example, against central differences."""
    encoder, task = with_head(family).double(), toy_task()
    batch = batch_of(encoder, task, range(6))
    shape = len(encoder.order), 6, head_count(encoder)
    _, slopes = gate_slopes(encoder, batch)

    def loss(gates):  # the library takes its losses in single precision, too coarse for differences
        with torch.no_grad(), gated(encoder, gates):
            return functional.cross_entropy(encoder(batch), batch.labels, reduction="none")

    step = 1e-5
    for place in range(shape[0]):
        for head in range(shape[2]):
            up, down = torch.ones(shape).double(), torch.ones(shape).double()
            up[place, :, head] += step
            down[place, :, head] -= step
            found = (loss(up) - loss(down)) / (2 * step)
            assert found.abs().max() > 1e-4
            torch.testing.assert_close(slopes[:, place, head].double(), found, atol=1e-6, rtol=1e-4)
    moved = torch.ones(shape).double()
    moved[0, 2, 1] = 0.0  # the gates of one example are nothing to the others
    assert (loss(moved) != loss(torch.ones(shape).double())).nonzero().flatten().tolist() == [2]


def test_importance_is_the_mean_of_single_examples(family):
    """One example at a time, without padding or company, gives the same; so does asking twice."""
    encoder, task = with_head(family), toy_task()
    found = head_importance(encoder, task, examples=12)
    again = head_importance(encoder, task, examples=12)
    alone = head_importance(encoder, task, examples=12, tokens=1)
    assert found == again  # nothing is left over from the first time
    torch.testing.assert_close(numbers_of(found), numbers_of(alone), atol=1e-6, rtol=1e-4)
    assert numbers_of(found).shape == (len(encoder.order), head_count(encoder)) == (found["layers"], found["heads"])
    assert found["examples"] == 12 and (numbers_of(found) > 0).all()
    assert (torch.tensor(found["slope"]).abs() <= numbers_of(found) + 1e-9).all()
    torch.testing.assert_close(torch.tensor(found["normalised"]).norm(dim=1), torch.ones(found["layers"]))
    json.dumps(found, allow_nan=False)


def test_importance_by_hand():
    """The mean of absolute values, and its standard error, from gradients taken one example at a time."""
    encoder, task = with_head(), toy_task()
    each = torch.cat([gate_slopes(encoder, batch_of(encoder, task, [n]))[1] for n in range(len(task.split("dev")))])
    found = head_importance(encoder, task)
    torch.testing.assert_close(numbers_of(found).float(), each.abs().mean(0), atol=1e-6, rtol=1e-4)
    error = each.abs().std(0) / len(each) ** 0.5
    torch.testing.assert_close(torch.tensor(found["error"]), error, atol=1e-6, rtol=1e-3)
    torch.testing.assert_close(torch.tensor(found["slope"]), each.mean(0), atol=1e-6, rtol=1e-3)


def test_a_head_that_is_not_read_has_no_importance(family):
    """With the columns of its output projection at zero, exactly none; all others have some."""
    encoder = with_head(family)
    layer, heads = layers(encoder.backbone)[0], head_count(encoder)
    out = part(encoder.backbone, layer, "out").module
    with torch.no_grad():
        out.weight.view(len(out.weight), heads, -1)[:, 2] = 0.0
    importance = numbers_of(head_importance(encoder, toy_task(), examples=8))
    silent = [place for place, number in enumerate(encoder.order) if number == 0]
    assert (len(silent) > 1) == (family == "albert")
    for place in range(len(encoder.order)):
        for head in range(heads):
            assert (importance[place, head] == 0) == (head == 2 and place in silent)


def test_albert_is_weighed_place_by_place():
    importance = numbers_of(head_importance(with_head("albert"), toy_task(), examples=8))
    assert not torch.allclose(importance[0], importance[1])


def test_the_encoder_is_left_as_it_was(family):
    encoder, task = with_head(family), toy_task()
    encoder.train()
    encoder.backbone.eval()  # a mixture of modes, to be given back as it was
    for parameter in list(encoder.parameters())[::2]:
        parameter.requires_grad_(False)
    before, hooks = snapshot(encoder), hooks_of(encoder)
    head_importance(encoder, task, examples=4, ablate=True)
    attention_summaries(encoder, task, examples=4)
    assert snapshot(encoder) == before and hooks_of(encoder) == hooks
    assert all(parameter.grad is None for parameter in encoder.parameters())


def test_gates_of_one_change_nothing_and_gates_of_zero_leave_the_bias(family):
    encoder = with_head(family)
    batch = batch_of(encoder, toy_task())
    shape = len(encoder.order), 1, head_count(encoder)
    seen = []
    out = part(encoder.backbone, layers(encoder.backbone)[0], "out").module
    with torch.no_grad():
        with gated(encoder, torch.ones(shape)):
            assert torch.equal(encoder(batch), encoder(batch))
            opened = encoder(batch)
        assert torch.equal(opened, encoder(batch))
        with gated(encoder, torch.zeros(shape)), out.register_forward_hook(lambda m, i, o: seen.append(o)):
            encoder(batch)
    rest = torch.zeros(1) if out.bias is None else out.bias
    assert all(torch.equal(output, rest.expand_as(output)) for output in seen)


def test_ablation_scores_the_model_without_a_head():
    """The score without a head is that of an encoder whose projection does not read it."""
    encoder, task = run("finetune(epochs=3, lr=1e-2)", small(), toy_task()).encoder, toy_task()
    found = head_importance(encoder, task, ablate=True)
    ablated = found["ablated"]
    assert ablated["score"] == evaluate(encoder, task)["scores"]["accuracy"]["value"]
    for place, head in ((0, 0), (1, 3)):
        cut = encoder.copy()
        out = part(cut.backbone, layers(cut.backbone)[place], "out").module
        with torch.no_grad():
            out.weight.view(len(out.weight), 4, -1)[:, head] = 0.0
        assert ablated["without"][place][head] == evaluate(cut, task)["scores"]["accuracy"]["value"]
    assert head_importance(encoder, task, examples=4)["ablated"] is None


@pytest.mark.parametrize("kind", ["pair", "regress", "tag", "answer"])
def test_every_kind_of_task(kind):
    encoder, task = with_head(kind=kind), toy_task(kind)
    found = head_importance(encoder, task, examples=6)
    torch.testing.assert_close(
        numbers_of(found), numbers_of(head_importance(encoder, task, examples=6, tokens=1)), atol=1e-6, rtol=1e-4
    )
    assert found["examples"] >= 6 and (numbers_of(found) > 0).all()


def test_the_loss_of_a_tagged_text_is_the_mean_over_its_tags():
    encoder, task = with_head(kind="tag"), toy_task("tag")
    batch = batch_of(encoder, task, [0, 1, 2])
    with torch.no_grad():
        each, scores = example_losses(encoder, batch), encoder(batch)
    for row in range(3):
        torch.testing.assert_close(each[row], functional.cross_entropy(scores[row], batch.labels[row]))


def test_an_encoder_without_a_head_for_the_task_is_refused(tiny):
    with pytest.raises(UserError, match=r"has no task head; fine-tune it"):
        head_importance(tiny(), toy_task())
    with pytest.raises(UserError, match=r"has a head for classify \(bad, good\); fine-tune it"):
        head_importance(with_head(), toy_task("pair"))
    with pytest.raises(UserError, match="has a head for classify"):
        head_importance(with_head(), toy_task("regress"))
    with pytest.raises(UserError, match="0 dev examples"):
        head_importance(with_head(), toy_task(), examples=0)


def test_classes_in_another_order_are_matched():
    encoder, task = with_head(), toy_task()
    turned = encoder.copy()
    with torch.no_grad():
        for values in (turned.head.out.weight, turned.head.out.bias):
            values.copy_(values.flip(0))
    turned.head.labels = encoder.head.labels[::-1]
    torch.testing.assert_close(
        numbers_of(head_importance(turned, task)), numbers_of(head_importance(encoder, task)), atol=1e-7, rtol=1e-5
    )


def test_models_that_cannot_be_weighed_say_why():
    whole = run("quantize(8, activations=True)", with_head(), toy_task()).encoder
    with pytest.raises(UserError, match="computes in integers"):
        head_importance(whole, toy_task(), examples=4)
    assert head_importance(run("quantize(8)", with_head(), toy_task()).encoder, toy_task(), examples=4)["examples"] == 4
    broken = with_head()
    with torch.no_grad():
        broken.head.out.bias[0] = math.nan
    with pytest.raises(UserError, match="not finite"):
        head_importance(broken, toy_task(), examples=4)


# Attention


@torch.no_grad()
def test_probabilities_are_those_of_hugging_face(tiny, family):
    """Against its own eager attention, over real tokens, with texts of unequal length."""
    encoder = tiny(family)
    batch = batch_of(encoder, toy_task(), range(8))
    assert batch.attention_mask is not None
    seen = {}
    with watched(encoder, seen.__setitem__):
        encoder(batch)
    eager = copy.deepcopy(encoder.backbone)
    eager.set_attn_implementation("eager")
    extra = {} if family in ("distilbert", "mpnet", "modernbert") else {"token_type_ids": batch.token_type_ids}
    theirs = eager(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask, output_attentions=True, **extra
    ).attentions
    assert sorted(seen) == list(range(len(theirs))) == list(range(len(encoder.order)))
    real = batch.tokens()
    both = (real[:, None, :, None] & real[:, None, None, :]).expand_as(seen[0])
    for place, other in enumerate(theirs):
        assert float((seen[place] - other)[both].abs().max()) < 1e-5
        assert float(seen[place][~real[:, None, None, :].expand_as(both) & real[:, None, :, None]].abs().max()) == 0
    assert float((theirs[0] - theirs[1])[both].abs().max()) > 1e-3  # layers do differ


def test_a_sliding_window_hides_what_is_far():
    encoder = make_encoder("modernbert")
    batch = batch_of(encoder, toy_task(), range(8))
    seen = {}
    with torch.no_grad(), watched(encoder, seen.__setitem__):
        encoder(batch)
    reach, tokens = encoder.backbone.config.sliding_window, batch.input_ids.shape[1]
    assert tokens > reach + 1
    kinds = [layer.attention_type for layer in layers(encoder.backbone)]
    assert {"sliding_attention", "full_attention"} == set(kinds)
    for place, kind in enumerate(kinds):
        assert (float(seen[place][-1, :, 0, reach + 1 :].max()) > 0) == (kind == "full_attention")


def test_summaries_of_matrices_made_by_hand():
    """Four heads over a text of 4 tokens and one of 3, the second padded: first, before, even, itself."""
    real = torch.tensor([[True] * 4, [True, True, True, False]])
    marked = {"to_cls": torch.tensor([[1, 0, 0, 0], [1, 0, 0, 0]]).bool()}
    marked["to_sep"] = torch.tensor([[0, 0, 0, 1], [0, 0, 1, 0]]).bool()
    first = torch.zeros(2, 4, 4)
    first[:, :, 0] = 1.0
    before = torch.zeros(2, 4, 4)
    before[:, 0, 0] = 1.0
    before[:, [1, 2, 3], [0, 1, 2]] = 1.0
    even = (real / real.sum(1, keepdim=True))[:, None].expand(-1, 4, -1).clone()
    even[1, 3] = torch.tensor([9.0, 9.0, 9.0, 9.0])  # what padding attends to is nobody's business
    found = add_up(torch.stack([first, before, even, torch.eye(4).expand(2, 4, 4)], 1), real, marked)
    close = lambda name, values: torch.testing.assert_close(found[name], torch.tensor(values).double())  # noqa: E731
    close("to_cls", [7.0, 4.0, 2.0, 2.0])
    close("to_sep", [0.0, 0.0, 2.0, 2.0])
    close("to_itself", [2.0, 2.0, 2.0, 7.0])
    close("to_previous", [2.0, 5.0, 3 / 4 + 2 / 3, 0.0])
    close("to_next", [0.0, 0.0, 3 / 4 + 2 / 3, 0.0])
    close("distance", [9.0, 5.0, (6 + 4 + 4 + 6) / 4 + (3 + 2 + 3) / 3, 0.0])
    close("entropy", [0.0, 0.0, 4 * math.log(4) + 3 * math.log(3), 0.0])
    close("entropy_share", [0.0, 0.0, 7.0, 0.0])
    assert found.keys() == SUMMARIES.keys()


def silent(encoder):
    """The encoder with queries at zero, so that every head attends evenly to all it may see."""
    with torch.no_grad():
        for layer in layers(encoder.backbone):
            q = part(encoder.backbone, layer, "q")
            for values in (q.module.weight, q.module.bias):
                if values is not None:
                    values.chunk(q.blocks)[q.block].zero_()
    return encoder


def test_a_head_without_a_query_attends_evenly():
    encoder, task = silent(make_encoder()), toy_task()
    found = attention_summaries(encoder, task)
    lengths = stream_of(encoder, task).views["student"].lengths
    for name in SUMMARIES:
        np.testing.assert_allclose(found[name], np.full((4, 4), found["even"][name]), rtol=1e-5)
    np.testing.assert_allclose(found["even"]["to_cls"], len(lengths) / lengths.sum())
    np.testing.assert_allclose(found["even"]["entropy"], (lengths * np.log(lengths)).sum() / lengths.sum())
    np.testing.assert_allclose(found["even"]["entropy_share"], 1.0)
    assert found["tokens"] == lengths.sum() and len(set(lengths)) > 1


def test_summaries_do_not_depend_on_padding_or_company(tiny, family):
    encoder, task = tiny(family), toy_task("pair")
    found, alone = (
        attention_summaries(encoder, task, examples=10),
        attention_summaries(encoder, task, examples=10, tokens=1),
    )
    for name in SUMMARIES:
        np.testing.assert_allclose(found[name], alone[name], atol=1e-5, rtol=1e-4)
        assert np.shape(found[name]) == (found["layers"], found["heads"]) == (4, 4)
    assert found["missing"] == {} and np.max(found["entropy_share"]) <= 1 + 1e-5
    json.dumps(found, allow_nan=False)


def test_texts_without_a_task_and_without_marks(tiny):
    encoder = tiny()
    found = attention_summaries(encoder, ["the film was good", "dull"], examples=9)
    assert found["examples"] == 2 and found["tokens"] == 6 + 3 and found["task"] is None
    assert HEAD not in encoder.heads
    bare = encoder.copy()
    bare.tokenizer = make_tokenizer()
    bare.tokenizer.cls_token = None
    found = attention_summaries(bare, ["good"])
    assert found["to_cls"] is None and found["missing"]["to_cls"] == "the tokenizer has no cls token"
    from tokenizers.processors import TemplateProcessing

    bare.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A:0", pair=None, special_tokens=[])
    found = attention_summaries(bare, ["good", "bad"])
    assert found["missing"]["to_sep"] == "the tokenizer puts no [SEP] into these texts"
    assert found["to_previous"] is None and found["to_itself"][0][0] == 1.0 and found["entropy"][0][0] == 0.0
    json.dumps(found, allow_nan=False)
    with pytest.raises(UserError, match="at least one text"):
        attention_summaries(encoder, [])


def test_weights_that_are_no_numbers_are_noticed(tiny):
    broken = tiny().copy()
    with torch.no_grad():
        part(broken.backbone, layers(broken.backbone)[1], "q").module.bias[0] = math.nan
    with pytest.raises(RunError, match="layer 2"):
        attention_summaries(broken, ["good"])


def test_progress_is_told(tiny):
    told = []
    attention_summaries(tiny(), toy_task(), say=lambda *what: told.append(what))
    head_importance(with_head(), toy_task(), examples=3, say=lambda *what: told.append(what), ablate=True)
    last = {stage: (done, total) for stage, done, total, _ in told}
    assert last == {"watching attention": (24, 24), "weighing heads": (3, 3), "leaving heads out": (8, 8)}


def test_every_separator_of_a_pair_is_counted(tiny):
    """A pair has two separators, and both are counted."""
    task = toy_task("pair")
    pairs = attention_summaries(silent(tiny().copy()), task)
    lengths = stream_of(tiny(), task).views["student"].lengths
    np.testing.assert_allclose(pairs["even"]["to_sep"], 2 * len(lengths) / lengths.sum())


# Tables and the picture


def found_of(layers=3, heads=4, **changes):
    """What the reports read, with importance 0.01, 0.02, … in the order of layers and heads."""
    grid = np.arange(1.0, layers * heads + 1).reshape(layers, heads) / 100
    shape = {"layers": layers, "heads": heads, "task": "toy", "split": "dev", "examples": 1200}
    importance = {**shape, "loss": 0.5, "importance": grid.tolist(), "error": (grid / 10).tolist(), "notes": ["a note"]}
    importance |= {"normalised": (grid / grid.max()).tolist(), "slope": grid.tolist(), "ablated": None}
    attention = {**shape, "tokens": 9000, "even": dict.fromkeys(SUMMARIES, 0.25), "missing": {}, "notes": ["a note"]}
    attention |= {name: (grid + number).tolist() for number, name in enumerate(SUMMARIES)}
    return {"importance": importance, "attention": attention, "missing": {}} | changes


def test_heads_are_ranked_and_shown_from_both_ends():
    few, many = found_of(), found_of(12, 12)
    assert rank(few["importance"])[:2] == [(2, 3), (2, 2)]
    assert [row["rank"] for row in head_rows(few)] == [str(n) for n in range(1, 13)]
    rows = head_rows(many)
    assert [row["rank"] for row in rows] == [str(n) for n in [*range(1, 11), *range(135, 145)]]
    assert (rows[0]["layer"], rows[0]["head"], rows[-1]["layer"], rows[-1]["head"]) == ("12", "12", "1", "1")
    assert rows[0]["importance"] == "1.44 ± 0.14" and rows[0]["[SEP]"] == "1.44" and rows[0]["after"] == "5.44"
    assert layer_rows(few)[1]["itself"] == "2.06" and layer_rows(few)[-1]["itself"] == "0.25"
    assert head_table(many).row_count == 20 and layer_table(few).row_count == 4


def test_markdown_says_what_was_measured():
    text = markdown(found_of())
    assert "toy (dev, 1,200 examples)" in text and text.count("- a note") == 1
    assert len([line for line in text.splitlines() if line.startswith("|")]) == 2 + 12 + 2 + 3 + 1
    ablated = {"metric": "accuracy", "score": 91.0, "stderr": 1.5, "without": [[90.5] * 4] * 3}
    text = markdown(found_of(importance={**found_of()["importance"], "ablated": ablated, "error": None}))
    assert "accuracy is 91.0 ± 1.5" in text and "| accuracy without |" in text and "| 90.5 |" in text
    silent = found_of(importance=None, missing={"importance": "this model has no task head"})
    assert "this model has no task head" in markdown(silent) and head_table(silent) is None
    bare = found_of()
    bare["attention"] |= {"to_sep": None, "missing": {"to_sep": "the tokenizer has no sep token"}}
    assert "to [SEP]: none, the tokenizer has no sep token" in markdown(bare) and "| [SEP] |" not in markdown(bare)


@pytest.mark.parametrize("without", [{}, {"importance": None}, {"attention": None}])
def test_the_picture_has_a_map_for_each_thing_found(tmp_path, without):
    found = found_of(24, 16, **without)
    figure = figure_of(found)
    maps = [axes for axes in figure.axes if axes.get_xticks().size and axes.collections and axes.texts]
    assert len(maps) == (0 if found["importance"] is None else 1) + (0 if found["attention"] is None else 8)
    canvas = figure.canvas.get_renderer()
    for axes in figure.axes:  # nothing is cut off at the edge
        box, page = axes.get_tightbbox(canvas), figure.bbox
        assert box.x0 >= page.x0 and box.y0 >= page.y0 and box.x1 <= page.x1 and box.y1 <= page.y1
    draw(found, tmp_path / "heads.png")
    assert (tmp_path / "heads.png").read_bytes()[:4] == b"\x89PNG"


def test_what_was_measured_can_be_shown(tmp_path):
    encoder, task = with_head(), toy_task()
    importance = head_importance(encoder, task, examples=5, ablate=True)
    found = {"importance": importance, "attention": attention_summaries(encoder, task, examples=5), "missing": {}}
    draw(found, tmp_path / "heads.png")
    assert "| accuracy without |" in markdown(found) and head_table(found).row_count == 8
