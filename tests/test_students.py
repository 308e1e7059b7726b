"""Students: what they keep of the teacher to the last bit, what they weigh, who teaches them, and that they learn."""

import numpy as np
import pytest
import torch
from toys import batch_of, check_refused, is_same_state, pairs, phase_of, run, scores_of, small, snapshot, toy_task
from transformers import AutoConfig, AutoModelForMaskedLM, AutoModelForSequenceClassification

from smallbert.errors import UserError
from smallbert.measuring.cost import count_parameters
from smallbert.model.anatomy import layers, part, words
from smallbert.model.encoder import load
from smallbert.model.folders import load_folder, save_folder
from smallbert.model.heads import losses
from smallbert.model.slicing import choose, features, top
from smallbert.model.words import WORDS, put_word_head
from smallbert.texts.data import tokenizer_key
from smallbert.tiny import SHAPES, make_tokenizer
from smallbert.training.importance import weigh_by_loss

TASK = toy_task("pair", 16)
PLAIN = ["bert", "roberta", "electra", "distilbert", "mpnet", "deberta-v2"]


def trained(family="bert", count=3, **shape):
    return run("head", small(family, layers=count, **shape), TASK, seed=5).encoder


def bert_size(width, ffn, count, vocabulary=100, places=72, outputs=3):
    """The closed form of a BERT classifier's parameters."""
    layer = 4 * width * (width + 1) + width * (2 * ffn + 1) + ffn + 4 * width
    return (vocabulary + places + 2 + 2) * width + count * layer + width * (width + 1) + outputs * (width + 1)


# Copied layers


COPIES = {
    "student(2)": [1, 3],
    "student(2, which='first')": [0, 1],
    "student(2, which='spread')": [0, 3],
    "student([0, 3])": [0, 3],
    "student(3, which='ends')": [0, 1, 3],
}


@pytest.mark.parametrize(("recipe", "family"), pairs(COPIES, SHAPES, every=4))
def test_copied_layers_are_those_of_the_file(recipe, family, tmp_path):
    kept = COPIES[recipe]
    teacher = run("head", small(family, layers=4), TASK).encoder
    save_folder(teacher, tmp_path / "teacher")
    file, student = load_folder(tmp_path / "teacher"), run(recipe, load_folder(tmp_path / "teacher"), TASK).encoder
    assert student.history[-1]["plan"]["layers"] == kept and len(student.order) == len(kept)
    if family == "albert":  # one layer, run again and again
        assert is_same_state(student, file)
        return
    for mine, number in zip(layers(student.backbone), kept, strict=True):
        theirs = layers(file.backbone)[number].state_dict()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.state_dict().items())
    rest = {n: t for n, t in student.state_dict().items() if ".layer" not in n}
    assert all(torch.equal(tensor, file.state_dict()[name]) for name, tensor in rest.items())


# Slices


@pytest.mark.parametrize("kin", PLAIN)
def test_a_slice_keeps_the_rows_of_the_chosen_heads_and_neurons(kin):
    teacher = trained(kin)
    student = run("student([0, 2], heads=2, ffn=20, start='slice')", teacher, TASK).encoder
    chosen = choose(teacher, [0, 2], 4, 2, 4, 20)
    for mine, number, choice in zip(layers(student.backbone), [0, 2], chosen, strict=True):
        theirs = layers(teacher.backbone)[number]
        rows = torch.cat([torch.arange(4) + 4 * head for head in choice.heads.tolist()])
        for role, index in (("q", rows), ("k", rows), ("v", rows), ("up", choice.neurons)):
            new, old = (part(e.backbone, x, role).module for e, x in ((student, mine), (teacher, theirs)))
            assert torch.equal(new.weight, old.weight[index]) and torch.equal(new.bias, old.bias[index])
        for role, index in (("out", rows), ("down", choice.neurons)):
            new, old = (part(e.backbone, x, role).module for e, x in ((student, mine), (teacher, theirs)))
            assert torch.equal(new.weight, old.weight[:, index]) and torch.equal(new.bias, old.bias)


def test_a_slice_of_everything_keeps_rows_columns_and_the_head():
    teacher = trained()
    student = run("student([1], width=12, ffn=9, start='slice')", teacher, TASK).encoder
    wide = top(features(teacher, [1]), 12)
    (choice,) = choose(teacher, [1], 4, 3, 4, 9)
    new, old = student.backbone, teacher.backbone
    assert torch.equal(words(new).weight, words(old).weight[:, wide])
    for name in ("position_embeddings", "token_type_embeddings"):
        assert torch.equal(getattr(new.embeddings, name).weight, getattr(old.embeddings, name).weight[:, wide])
    assert torch.equal(new.embeddings.LayerNorm.weight, old.embeddings.LayerNorm.weight[wide])
    mine, theirs = layers(new)[0], layers(old)[1]
    assert torch.equal(mine.attention.self.query.weight, theirs.attention.self.query.weight[choice.looks][:, wide])
    assert torch.equal(mine.attention.output.dense.weight, theirs.attention.output.dense.weight[wide][:, choice.passes])
    assert torch.equal(mine.output.dense.weight, theirs.output.dense.weight[wide][:, choice.neurons])
    assert torch.equal(student.head.dense.weight, teacher.head.dense.weight[wide][:, wide])
    assert torch.equal(student.head.out.weight, teacher.head.out.weight[:, wide])
    assert count_parameters(student)["total"] == bert_size(12, 9, 1)


def test_modernbert_keeps_both_rows_of_a_gated_neuron_and_q_k_v_of_a_head():
    teacher = trained("modernbert")
    student = run("student([2], heads=2, ffn=10, start='slice')", teacher, TASK).encoder
    (choice,) = choose(teacher, [2], 4, 2, 4, 10)
    mine, theirs = layers(student.backbone)[0], layers(teacher.backbone)[2]
    rows = torch.cat([torch.arange(4) + 4 * head for head in choice.heads.tolist()])
    assert torch.equal(mine.attn.Wqkv.weight, theirs.attn.Wqkv.weight[torch.cat([rows, rows + 16, rows + 32])])
    assert torch.equal(mine.mlp.Wi.weight, theirs.mlp.Wi.weight[torch.cat([choice.neurons, choice.neurons + 32])])


@pytest.mark.parametrize("heads", [4, 2])
def test_smaller_heads_turn_as_fast_as_those_they_were_cut_out_of(heads):
    """A head of half the size has every second angle, so its numbers stay where they turned as they do now."""
    teacher, size = trained("modernbert", num_attention_heads=heads), 8 // heads
    student = run(f"student([2], width=8, heads={heads}, start='slice')", teacher, TASK).encoder
    place = torch.arange(5)[None]
    angles = [e.backbone.rotary_emb(torch.zeros(1), place, "full_attention")[0][0] for e in (teacher, student)]
    (choice,) = choose(teacher, [2], heads, heads, size, 16)
    assert choice.looks.tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
    torch.testing.assert_close(angles[0][:, choice.looks[:size]], angles[1])
    assert torch.isfinite(scores_of(student, TASK)).all()
    with pytest.raises(UserError, match="even size"):
        run(f"student([2], width={3 * heads}, heads={heads}, start='slice')", teacher, TASK)


def test_values_of_smaller_heads_are_those_that_are_passed_on():
    """In one matrix with q and k, which are chosen otherwise."""
    teacher = trained("modernbert")
    with torch.no_grad():
        layers(teacher.backbone)[2].attn.Wo.weight[:, ::4] = 0  # the first number of each head, at which it looks
    student = run("student([2], width=8, heads=4, start='slice')", teacher, TASK).encoder
    (choice,) = choose(teacher, [2], 4, 4, 2, 16)
    wide, (looks, passes) = top(features(teacher, [2]), 8), (choice.looks, choice.passes)
    assert (looks % 4 == 0).any() and (passes % 4 > 0).all()
    mine, theirs = layers(student.backbone)[0].attn, layers(teacher.backbone)[2].attn
    rows = torch.cat([looks, looks + 16, passes + 32])
    assert torch.equal(mine.Wqkv.weight, theirs.Wqkv.weight[rows][:, wide])
    assert torch.equal(mine.Wo.weight, theirs.Wo.weight[wide][:, passes])


def test_large_values_that_nothing_reads_are_not_kept():
    teacher = trained()
    with torch.no_grad():
        attention = layers(teacher.backbone)[1].attention
        attention.self.value.weight[[1, 2]] *= 9
        attention.output.dense.weight[:, [1, 2]] = 0
    (choice,) = choose(teacher, [1], 4, 4, 2, 32)
    assert choice.passes[:2].tolist() == [0, 3]


def test_heads_that_share_a_bias_are_the_same_in_all_layers():
    """One layer would keep the first head and the other the last; the last weighs more in both together."""
    teacher = trained("mpnet")
    with torch.no_grad():
        for number, rows, times in ((0, slice(0, 4), 10), (2, slice(12, 16), 100)):
            part(teacher.backbone, layers(teacher.backbone)[number], "q").module.weight[rows] *= times
    assert [one.heads.tolist() for one in choose(teacher, [0, 2], 4, 1, 4, 32)] == [[3], [3]]
    student = run("student([0, 2], heads=1, start='slice')", teacher, TASK).encoder
    biases = [encoder.backbone.encoder.relative_attention_bias.weight for encoder in (student, teacher)]
    assert torch.equal(biases[0], biases[1][:, [3]])


def test_what_weighs_nothing_goes_first():
    """A head and neurons at zero are not kept, and a model that had only those to lose gives the same scores."""
    teacher = trained()
    with torch.no_grad():
        for layer in layers(teacher.backbone):
            layer.attention.output.dense.weight[:, 4:8] = 0
            layer.attention.self.query.weight[4:8] = 0
            layer.output.dense.weight[:, [3, 30]] = 0
    student = run("student([0, 1, 2], heads=3, ffn=30, start='slice')", teacher, TASK).encoder
    torch.testing.assert_close(scores_of(student, TASK), scores_of(teacher, TASK))
    assert count_parameters(student)["encoder"] == 3 * (4 * 12 * 16 + 2 * 16 * 30)


def test_by_the_loss_what_never_speaks_goes_first():
    """Neurons with the largest weights of all, but far below where their activation begins."""
    teacher, dead = trained(), [3, 17, 30]
    with torch.no_grad():
        for layer in layers(teacher.backbone):
            layer.intermediate.dense.weight[dead] *= 5
            layer.intermediate.dense.bias[dead] = -1000.0
    loss, size = (
        run(f"student([0, 1, 2], ffn=29, start='slice', by='{by}')", teacher, TASK).encoder for by in ("loss", "size")
    )
    torch.testing.assert_close(scores_of(loss, TASK), scores_of(teacher, TASK))
    assert not torch.allclose(scores_of(size, TASK), scores_of(teacher, TASK), atol=1e-4)


def test_features_matter_by_the_sum_of_what_their_weights_do():
    """Which is known by the loss; only of weights themselves are squares taken."""
    teacher = trained()
    layer, numbers = layers(teacher.backbone)[1], torch.Generator().manual_seed(0)
    importance = {one: torch.rand(one.shape, generator=numbers) for one in teacher.backbone.parameters()}
    matrix = {role: part(teacher.backbone, layer, role).module.weight for role in ("q", "k", "v", "up", "out", "down")}
    for found, told in ((importance, importance), (None, {one: one.detach() ** 2 for one in matrix.values()})):
        wanted = sum(told[one].sum(1 if role in ("out", "down") else 0) for role, one in matrix.items())
        torch.testing.assert_close(features(teacher, [1], found), wanted)


def test_importance_is_weights_times_gradients(family):
    """Summed over batches; of one example at a time it is what autograd says, and the encoder stays as it was."""
    teacher = trained(family, count=2)
    before = snapshot(teacher)
    found = weigh_by_loss(teacher, toy_task("pair", 40), 40, 0)
    assert snapshot(teacher) == before and set(found) == set(teacher.backbone.parameters())
    order = torch.from_numpy(np.random.default_rng(0).permutation(40))
    wanted = dict.fromkeys(found, 0.0)
    for some in order.split(32):
        batch = batch_of(teacher, toy_task("pair", 40), some.tolist(), split="train")
        loss = losses(teacher.head, teacher(batch), batch).sum()
        got = torch.autograd.grad(loss, list(found), allow_unused=True)
        wanted = {
            p: wanted[p] + (0.0 if g is None else (p * g).abs().detach()) for p, g in zip(found, got, strict=True)
        }
    for parameter, value in found.items():
        torch.testing.assert_close(value, wanted[parameter] + torch.zeros_like(value), atol=1e-5, rtol=1e-3)
    if family != "mobilebert":
        student = run("student(1, width=12, ffn=20, start='slice', by='loss')", teacher, TASK).encoder
        assert torch.isfinite(scores_of(student, TASK)).all()


def test_zeros_stay_held_in_a_slice():
    sparse = run("magnitude(0.5) + train(epochs=1, batch=8) | student(2, heads=2, start='slice')", trained(), TASK)
    names = [name for name, _ in sparse.encoder.held("zeros")]
    assert len(names) == 12
    later = run("finetune(epochs=1, batch=8, lr=0.01)", sparse.encoder, TASK).encoder
    for name in names:
        before, after = (e.get_submodule(name).weight for e in (sparse.encoder, later))
        assert torch.equal(before == 0, after == 0) and not torch.equal(before, after)


@pytest.mark.parametrize(
    ("recipe", "size"),
    [
        ("student(2, width=8, start='slice')", (8, 16, 2)),
        ("student(2, width=8, heads=4, ffn=11, start='slice')", (8, 11, 2)),
        ("student(1, width=24, heads=4, start='random')", (24, 48, 1)),
        ("student(3, start='random')", (16, 32, 3)),
    ],
)
def test_counts_are_the_closed_form_and_hugging_face_loads(recipe, size, tmp_path):
    student = run(recipe, trained(), TASK).encoder
    assert count_parameters(student)["total"] == bert_size(*size)
    assert save_folder(student, tmp_path / "model") == "huggingface"
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    assert theirs.config.hidden_size == size[0] and theirs.config.num_hidden_layers == size[2]
    batch = batch_of(student, TASK)
    inputs = {name: getattr(batch, name) for name in ("input_ids", "token_type_ids", "attention_mask")}
    torch.testing.assert_close(theirs(**inputs).logits, scores_of(student, TASK), atol=1e-5, rtol=1e-4)
    assert is_same_state(load_folder(tmp_path / "model"), student)


@pytest.mark.parametrize("recipe", ["student(2, width=12, start='slice')", "student(2, width=12, start='random')"])
def test_every_family_saves_and_loads_narrower_ones(recipe, family, tmp_path):
    if family == "mobilebert":
        pytest.skip("a bottleneck has other sizes than a width")
    student = run(recipe, trained(family), TASK).encoder
    assert student.width == 12 and torch.isfinite(scores_of(student, TASK)).all()
    assert save_folder(student, tmp_path / "model") == "huggingface"
    loaded = load_folder(tmp_path / "model")
    assert is_same_state(loaded, student) and torch.equal(scores_of(loaded, TASK), scores_of(student, TASK))
    if student.packable:
        packed = scores_of(student, TASK, packed=True, slots=6)[:5]
        torch.testing.assert_close(packed, scores_of(student, TASK), atol=2e-5, rtol=1e-4)


def test_random_students_follow_the_seed():
    one, again, other = (run("student(1, start='random')", trained(), TASK, seed).encoder for seed in (3, 3, 4))
    assert is_same_state(one, again) and not is_same_state(one, other)
    assert not torch.equal(words(one.backbone).weight, words(trained().backbone).weight)


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("student(5)", "the model has 3"),
        ("student([2, 1])", "from 0 to 2"),
        ("student([0, 2], which='first')", "leave out which='first'"),
        ("student(2, start='random', which='first')", "leave out which='first'"),
        ("student(2, start='slice', width=8, examples=64)", "examples=64 tell the gradient for by='loss'"),
        ("student(2, width=8)", "start='slice'"),
        ("student(2, by='loss')", "write start='slice'"),
        ("student(2, width=32, start='slice')", "cannot be cut out of width=16"),
        ("student(2, width=16, heads=2, start='slice')", "a head of 8 dimensions"),
        ("student(2, width=10, heads=3, start='random')", "3 equal heads"),
        ("quantize | student(2, width=8, start='slice')", "plain weights"),
        ("stride(2) | student(2, width=8, start='slice')", "after it"),
        ("mix_layers | lstm", "after it"),
        ("lstm(4, embed=8) | drop_layers(1)", "works on layers"),
        ("lstm(4, embed=8) | student(1)", "works on layers"),
        ("lstm(4, embed=8) | mix_layers", "works on layers"),
        ("lstm(4, embed=8) | stride(2)", "works on layers"),
        ("lstm(4, embed=8) | connect_layers", "works on layers"),
        ("lstm(4, embed=17)", "word embeddings cannot have 17 dimensions"),
        ("student(3, model='x')", r"student\(model='x'\) \| student\(4\)"),
        ("small_vocabulary(text='nowhere.txt')", "no file or folder"),
    ],
)
def test_refusals(recipe, said):
    check_refused(recipe, trained(), TASK, said)


# Another checkpoint


@pytest.mark.parametrize("kin", ["electra", "bert", "mobilebert", "albert"])
def test_any_other_checkpoint_with_its_own_tokenizer(kin, tmp_path):
    """Its backbone to the last bit, its tokenizer, its pooler in the head; the teacher reads the texts its own way."""
    save_folder(run("small_vocabulary(50)", small(kin, seed=9), toy_task("classify")).encoder, tmp_path / "tuned")
    bare = small(kin, seed=9)
    save_folder(bare, tmp_path / "bare")
    for name, vocabulary in (("bare", 100), ("tuned", 50)):
        recipe = f"student(model='{tmp_path / name}')"
        student = run(recipe, trained("roberta"), TASK).encoder
        found = load(str(tmp_path / name))
        assert student.family == kin and student.head.labels == ["bad", "good", "none"]
        assert tokenizer_key(student.tokenizer) == tokenizer_key(found.tokenizer)
        assert is_same_state(student.backbone, found.backbone) and student.backbone.config.vocab_size == vocabulary
        save_folder(student, tmp_path / "again" / name)
        assert is_same_state(load_folder(tmp_path / "again" / name), student)
    if bare.pooler is not None:
        assert torch.equal(run(f"student(model='{tmp_path / 'bare'}')", trained(), TASK).encoder.head.dense.weight,
                           bare.pooler.weight)  # fmt: skip
    phase = phase_of(f"{recipe} | distill + train(epochs=1, batch=8)", trained("roberta"), TASK)
    assert set(phase.stream.views) == {"student", "teacher latest"}


def test_a_checkpoint_of_this_very_task_keeps_its_head(tmp_path):
    tuned = run("finetune(epochs=1, batch=8)", small("electra"), TASK).encoder
    save_folder(tuned, tmp_path / "tuned")
    student = run(f"student(model='{tmp_path / 'tuned'}')", trained(), TASK).encoder
    assert torch.equal(scores_of(student, TASK), scores_of(tuned, TASK))


def test_another_checkpoint_brings_its_second_vocabulary_and_what_its_file_has_for_words(tmp_path):
    model = AutoModelForMaskedLM.from_config(AutoConfig.for_model("bert", **SHAPES["bert"]))
    model.save_pretrained(tmp_path / "words")
    make_tokenizer().save_pretrained(tmp_path / "words")
    student = run(f"student(model='{tmp_path / 'words'}')", trained("roberta"), TASK).encoder
    assert put_word_head(student) == "its model file"
    assert torch.equal(student.heads[WORDS].dense.weight, model.cls.predictions.transform.dense.weight)
    read = run("pretrain(steps=2, batch=4, keep_head=True)", small(), TASK).encoder
    save_folder(read, tmp_path / "read")
    student = run(f"student(model='{tmp_path / 'read'}')", trained("roberta"), TASK).encoder
    assert put_word_head(student) == "its model file"
    assert torch.equal(student.heads[WORDS].dense.weight, read.heads[WORDS].dense.weight)
    two = run("add_vocabulary(110)", small(), TASK).encoder
    save_folder(two, tmp_path / "two")
    student = run(f"student(model='{tmp_path / 'two'}')", trained("roberta"), TASK).encoder
    assert student.second == two.second and student.second


# Who teaches


@pytest.mark.parametrize(
    "student", ["student(1)", "student(2, width=8, start='slice')", "lstm(4, embed=8)", "small_vocabulary(60)",
                "bottleneck(layers=1, width=16, inner=8, heads=2, ffns=2, ffn=16, embed=8)", "stride(2)"]
)  # fmt: skip
@pytest.mark.parametrize("joint", ["|", "+"])
def test_the_fine_tuned_model_teaches(student, joint):
    """Whether the student is made in a phase of its own or beside its distillation."""
    tune = "finetune(epochs=1, batch=8, lr=0.001)"
    teacher = run(tune, trained(), TASK).encoder
    phase = phase_of(f"{student} {joint} distill + train(epochs=1, batch=8)", teacher, TASK)
    assert is_same_state(phase.teacher("latest"), teacher) and not is_same_state(phase.encoder, teacher)
    whole = run(f"{tune} | {student} {joint} distill + train(epochs=1, batch=8)", trained(), TASK).encoder
    assert torch.isfinite(scores_of(whole, TASK)).all()
