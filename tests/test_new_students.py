"""Students of another make: a small vocabulary, an LSTM, bottlenecks, a stride."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from toys import accuracy, batch_of, daily, is_same_state, phase_of, run, scores_of, small, toy_task
from transformers import AutoTokenizer

from smallbert.cli.catalog import inspect_folder
from smallbert.errors import UserError
from smallbert.making import make, starting
from smallbert.making.estimate import look_ahead
from smallbert.measuring.card import MACHINERY_CHECK
from smallbert.measuring.cost import count_macs, count_parameters, measure
from smallbert.methods.bottleneck import Bottleneck
from smallbert.model.anatomy import layers, part, words
from smallbert.model.folders import load_folder, save_folder
from smallbert.model.replace import bare
from smallbert.model.vocabulary import special_pieces
from smallbert.presets import PRESETS
from smallbert.recipes.recipe import Recipe
from smallbert.texts.batches import Layout, make_batch
from smallbert.texts.data import STUDENT, Stream, _end_to_end, tokenizer_key
from smallbert.tiny import make_task

TASK = toy_task("pair", 16)


def trained(family="bert"):
    return run("head", small(family, layers=3), TASK, seed=5).encoder


# A small vocabulary


def test_a_small_vocabulary_reads_and_comes_back(tmp_path, family):
    texts = tmp_path / "some.txt"
    texts.write_text("The lovely films were moving, and unmoving!\n" * 5 + "A warm story.\n", encoding="utf-8")
    teacher = trained(family)
    student = run(f"small_vocabulary(90, text='{texts}')", teacher, TASK).encoder
    pieces = student.history[-1]["plan"]["pieces"]
    assert student.history == run(f"small_vocabulary(90, text='{texts}')", teacher, TASK).encoder.history
    assert len(pieces) == student.backbone.config.vocab_size == len(words(student.backbone).weight) <= 90
    tokenizer = student.tokenizer
    ids = tokenizer("The lovely films", "unmoving story")["input_ids"]
    assert [ids[0], ids[-1]] == [tokenizer.cls_token_id, tokenizer.sep_token_id] and tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the lovely films unmoving story"
    assert tokenizer.pad_token_id == student.backbone.config.pad_token_id
    save_folder(student, tmp_path / "model")
    loaded, theirs = load_folder(tmp_path / "model"), AutoTokenizer.from_pretrained(tmp_path / "model")
    assert is_same_state(loaded, student)
    for one in (loaded.tokenizer, theirs):
        assert one("The lovely films", "unmoving story")["input_ids"] == ids


def test_a_vocabulary_that_cannot_write_the_task_is_refused(tmp_path):
    (tmp_path / "other.txt").write_text("xyz zyx\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"pieces learned from .*other.txt leave .* of the tokens of train .* unknown"):
        run(f"small_vocabulary(90, text='{tmp_path / 'other.txt'}')", trained(), TASK)
    note, *_ = run("small_vocabulary(120)", trained(), TASK).notes
    assert re.fullmatch(
        r"small_vocabulary has [\d,]+ word pieces, and leaves 0.0% of .* train and .* dev unknown", note
    )


def test_new_pieces_begin_as_the_mean_of_the_old_ones():
    teacher = trained()
    student = run("small_vocabulary(120)", teacher, TASK).encoder
    again = run("small_vocabulary(40)", student, TASK).encoder  # from word pieces to fewer ones
    old, new = student.tokenizer.get_vocab(), again.tokenizer.get_vocab()
    before, after = words(student.backbone).weight, words(again.backbone).weight
    assert all(torch.equal(after[number], before[old[piece]]) for piece, number in new.items() if piece in old)
    rows, known = words(teacher.backbone).weight, teacher.tokenizer.get_vocab()
    mine, table = student.tokenizer.get_vocab(), words(student.backbone).weight
    assert "film" in mine and torch.equal(table[mine["film"]], rows[known["film"]])
    assert torch.equal(table[mine["[CLS]"]], rows[known["[CLS]"]])
    unknown = [number for piece, number in mine.items() if piece.removeprefix("##") not in known]
    torch.testing.assert_close(table[unknown[0]], rows.mean(0))


def test_special_pieces_with_small_numbers_keep_them():
    class Old:
        cls_token, pad_token, sep_token, unk_token, mask_token = "<s>", "<pad>", "</s>", "<unk>", "<mask>"

        @staticmethod
        def get_vocab():
            return {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "<mask>": 50264}

    assert special_pieces(Old) == ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


# An LSTM


@pytest.mark.parametrize(("kind", "features"), [("classify", 12), ("pair", 48), ("regress", 12), ("tag", 12)])
def test_an_lstm_weighs_what_it_should(kind, features, tmp_path):
    task = toy_task(kind)
    student = run("lstm(6, inner=5, embed=7)", small(), task).encoder
    lstm = 2 * (4 * 6 * (7 + 6) + 2 * 4 * 6)
    outputs = student.head.out.out_features
    whole = 100 * 7 + lstm + features * 5 + 5 + outputs * 6
    assert count_parameters(student)["total"] == whole
    save_folder(student, tmp_path / "model")
    loaded = load_folder(tmp_path / "model")
    assert is_same_state(loaded, student) and torch.equal(scores_of(loaded, task), scores_of(student, task))
    found = measure(student, tmp_path / "model", length=10, seconds=0.01)
    assert found["bytes"]["weights"] > 4 * whole and found["latency"]["p50_ms"] > 0
    texts = 2 if kind == "pair" else 1
    steps = 2 * texts * 10 * 4 * 6 * (7 + 6)
    rest = (10 if kind == "tag" else 1) * (features * 5 + 5 * outputs)
    assert count_macs(student, 10) == steps + rest


def test_an_lstm_is_torchs_own():
    student = run("lstm(6, layers=2, inner=5, embed=7)", small(), toy_task()).encoder.backbone
    theirs = torch.nn.LSTM(7, 6, 2, batch_first=True, bidirectional=True)
    with torch.no_grad():
        for name, tensor in theirs.named_parameters():
            number, back = int(name.split("_l")[1][0]), name.endswith("_reverse")
            mine = (student.backwards if back else student.forwards)[number]
            kind, gate = name.split("_")[0], mine.read if "_ih_" in name else mine.recall
            tensor.copy_(getattr(gate, kind))
        values, lengths = torch.randn(3, 5, 7), torch.tensor([5, 2, 3])
        packed = torch.nn.utils.rnn.pack_padded_sequence(values, lengths, batch_first=True, enforce_sorted=False)
        wanted = torch.nn.utils.rnn.pad_packed_sequence(theirs(packed)[0], batch_first=True)[0]
        torch.testing.assert_close(student._run(values, lengths), wanted)


def test_pairs_are_read_one_by_one():
    """The first half is what the first text gives alone, whatever stands behind it."""
    task = toy_task("pair")
    student = run("lstm(6, inner=5)", small(), task).encoder.eval()
    seen = []
    student.backbone.dense.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    encode = student.tokenizer
    ids = encode("the film", "was very good")["input_ids"]
    stream = Stream({STUDENT: _end_to_end([torch.tensor(ids).numpy()], [torch.zeros(len(ids)).numpy()])}, None, "x")
    student(make_batch(stream, [0], Layout(False, 64)))
    (one,) = seen
    assert not torch.allclose(one[:, :12], one[:, 12:24])
    torch.testing.assert_close(one[:, 24:36], (one[:, :12] - one[:, 12:24]).abs())
    torch.testing.assert_close(one[:, 36:], one[:, :12] * one[:, 12:24])
    first = encode("the film")["input_ids"]
    plain = student.backbone._run(student.backbone.embeddings(torch.tensor([first])), torch.tensor([len(first)]))
    torch.testing.assert_close(one[:, :12], torch.cat([plain[:, -1, :6], plain[:, 0, 6:]], -1))


def test_words_are_copied_reduced_or_new():
    teacher = trained()
    table = words(teacher.backbone).weight
    same, fewer, new = (run(f"lstm(4{more})", teacher, TASK).encoder for more in ("", ", embed=5", ", words='new'"))
    assert torch.equal(words(same.backbone).weight, table)
    assert words(new.backbone).weight.shape == (100, 300)
    found = words(fewer.backbone).weight
    best = torch.linalg.svdvals(table)[:5].square().sum()
    torch.testing.assert_close(found.square().sum(), best)  # no five directions hold more
    frozen = run("lstm(4) | train(epochs=1, batch=8, lr=0.01, freeze='embeddings')", teacher, TASK).encoder
    assert torch.equal(words(frozen.backbone).weight, table)


def test_presets_that_cannot_take_an_lstm_say_so_before_anything_is_trained():
    given = run("lstm(6, inner=5, embed=128, words='new')", small(), TASK).encoder
    presets = {name: Recipe(preset.recipe) for name, preset in PRESETS.items()}
    found = look_ahead(presets.values(), given, TASK)
    taken = {"baseline", "int8", "bilstm", "bilstm_trimmed", "bilstm_tiny"}
    assert {name for name in presets if found[presets[name]].refused is None} == taken
    assert "has no layers to compare" in str(found[presets["mobilebert"]].refused)


@pytest.mark.parametrize("what", ["attention", "scores", "relations", "embeddings", "hidden"])
@pytest.mark.parametrize("student", ["lstm(6, inner=5)", "head"])
def test_layers_are_not_compared_where_there_are_none(what, student):
    with pytest.raises(UserError, match="'bilstm' has no layers to compare; write align"):
        teacher = "mark('here')" if student != "head" else "lstm(6, inner=5) | mark('here')"
        run(f"{teacher} | {student} | align({what!r}, teacher='here') + train(epochs=1, batch=8)", small(), TASK)


def test_a_distilled_lstm_learns():
    task = toy_task("classify", 96)
    teacher = run("finetune(epochs=12, batch=8, lr=0.002)", small(hidden_dropout_prob=0.0), task).encoder
    assert accuracy(teacher, task) > 95
    taught = "lstm(16, inner=16) | distill(alpha=1.0) + train(epochs=15, batch=8, lr=0.01)"
    assert accuracy(run(taught, teacher, task).encoder, task, "dev") > 85


# Bottlenecks and strides


def test_mobileberts_own_size_is_published():
    """25.3 million parameters, as its paper says, of which the words are 30,522 x 128."""
    teacher = small(vocab_size=30522, hidden_size=128, max_position_embeddings=512)
    plan = Bottleneck().plan(teacher, None)
    total = count_parameters(bare(plan["config"], pooler=True))["total"]
    assert 24.5e6 < total < 25.5e6
    assert plan["config"]["trigram_input"] and plan["config"]["normalization_type"] == "no_norm"


def test_a_bottleneck_student_is_a_hugging_face_model(tmp_path):
    student = run("bottleneck(layers=2, width=24, inner=8, heads=2, ffns=3, ffn=16, embed=8)", trained(), TASK).encoder
    assert save_folder(student, tmp_path / "model") == "huggingface"
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "mobilebert"
    layer = layers(student.backbone)[0]
    assert len(layer.ffn) == 2 and type(layer.ffn[0].output.LayerNorm).__name__ == "NoNorm"
    roles = 8 * 8 * 3 + 24 * 8 + 2 * 8 * 16  # q, k, out; v reads the wide state; the last feed-forward network
    assert count_parameters(student)["encoder"] == 2 * (roles + 2 * 24 * 8 + 8 * 24 + 2 * 2 * 8 * 16)
    trained_on = run("finetune(epochs=1, batch=8)", student, TASK).encoder
    assert save_folder(trained_on, tmp_path / "later") == "huggingface"  # padding is still nothing


def test_a_stride_joins_tokens_and_tells_them_apart_again(family):
    """With layers that change nothing it is the identity; the layers see half as many tokens."""
    encoder = run("stride(2)", small(family), TASK).encoder
    batch = batch_of(encoder, TASK)
    lengths = []

    def note(place, hidden, layer):
        lengths.append(hidden.shape[1])
        return hidden

    states = encoder.states(batch, route=note)
    assert lengths == [-(-batch.input_ids.shape[1] // 2)] * len(encoder.order)
    real = batch.tokens()
    if family != "modernbert":  # which has a norm behind its layers
        torch.testing.assert_close(states.last[real], states.hidden[0][real], atol=1e-5, rtol=1e-5)
    assert all(hidden.shape == states.hidden[0].shape for hidden in states.hidden)


def test_a_group_cut_short_by_padding_weighs_as_much_as_a_whole_one():
    """At first a group is the mean of its tokens; padding is none of them."""
    encoder = run("stride(4)", small(), TASK).encoder
    batch = batch_of(encoder, TASK, range(8))
    hidden = torch.randn(*batch.input_ids.shape, encoder.width, generator=torch.Generator().manual_seed(0))
    joined, short, _ = encoder.stride(hidden, batch)
    for row, length in enumerate(batch.attention_mask.sum(-1).tolist()):
        groups = hidden[row, :length].split(4)
        torch.testing.assert_close(joined[row, : len(groups)], torch.stack([group.mean(0) for group in groups]))
        assert int(short.attention_mask[row].sum()) == len(groups)
    assert {length % 4 for length in batch.attention_mask.sum(-1).tolist()} - {0}


@pytest.mark.parametrize("kind", ["tag", "answer"])
def test_a_strided_model_learns_tokens_and_spans(kind):
    task = toy_task(kind, 64)
    recipe = "stride(2) | finetune(epochs=25, batch=8, lr=0.004)"
    encoder = run(recipe, small(hidden_size=32, hidden_dropout_prob=0.0), task).encoder
    plain = {"tag": 50.0, "answer": 30.0}[kind]
    assert accuracy(encoder, task) > plain + 20


def test_a_stride_halves_the_multiplications_of_the_layers():
    encoder = small(layers=4)
    strided = run("stride(2)", encoder).encoder
    whole, short = (count_macs(run("student(3)", e).encoder, 32) for e in (encoder, strided))
    assert count_macs(encoder, 32) - whole == 32 * (4 * 16 * 16 + 2 * 16 * 32) + 2 * 32 * 32 * 16
    assert count_macs(strided, 32) - short == 16 * (4 * 16 * 16 + 2 * 16 * 32) + 2 * 16 * 16 * 16


# Together


@pytest.mark.parametrize(
    "student",
    daily(
        [
            "student(1, ffn=20, start='slice') | stride(2) | share_projections + distill + train(epochs=1, batch=8)",
            "student(1, width=8, start='slice') | small_vocabulary(60)",
            "lstm(4, embed=8)",
            "bottleneck(layers=1, width=16, inner=8, heads=2, ffns=2, ffn=16, embed=8)",
        ],
        every=6,
    ),
)
def test_a_student_is_made_measured_looked_into_and_resumed(student, tmp_path, monkeypatch):
    """The whole way of a user: a card, what the folder holds, and a second run that goes on from what is there."""
    recipe = f"finetune(epochs=1, batch=16) | {student} | distill + train(epochs=1, batch=16)"
    given = starting.tiny_start("bert")
    card = make.make_one(recipe, given, make_task(64, 30), 0, tmp_path / "out", kind=MACHINERY_CHECK, alone=True)
    assert card["status"] in ("ok", "diverged") and card["bytes"]["total"] > 0 and card["macs"]["value"] > 0
    found = inspect_folder(tmp_path / "out")
    assert found["parameters"]["total"] == card["parameters"]["total"] and len(found["history"]) >= 3
    assert all(row["fits"] or row["why"] for row in found["presets"])
    task = toy_task("classify")
    whole = run(recipe, small(), task, work=tmp_path / "work").encoder
    with monkeypatch.context() as patched:
        patched.setattr("smallbert.making.run.train", None)  # every phase is there already
        again = run(recipe, small(), task, work=tmp_path / "work").encoder
    assert is_same_state(again, whole) and tokenizer_key(again.tokenizer) == tokenizer_key(whole.tokenizer)


@pytest.mark.parametrize(("way", "shapes"), [("down", ((12, 16), (16, 12))), ("up", ((16, 12), (12, 16)))])
def test_shared_projections_measure_weights(way, shapes):
    """One pair a kind for all layers; the loss is the mean of squares, and zero where the student is the projection."""
    recipe = f"student(2, width=12, ffn=32, start='random') + share_projections(way='{way}') + train(epochs=1, batch=8)"
    teacher = run("finetune(epochs=1, batch=8)", small(layers=4), TASK).encoder
    phase = phase_of(recipe, teacher, TASK)
    pairs = phase.modules["share_projections"]
    assert sorted(pairs) == ["down", "k", "out", "q", "up", "v"]
    assert (pairs["q"].left.shape, pairs["q"].right.shape) == shapes
    method = next(one for one in phase.methods if one.name == "share_projections")
    step = SimpleNamespace(phase=phase, penalty=lambda value: value)
    total = []
    for place, other in enumerate((1, 3)):
        for role, pair in pairs.items():
            ours, theirs = (
                part(e.backbone, layers(e.backbone)[number], role).module.weight
                for e, number in ((phase.encoder, place), (teacher, other))
            )
            source, goal = (theirs, ours) if way == "down" else (ours, theirs)
            total.append(((pair.left @ source @ pair.right - goal) ** 2).mean())
    torch.testing.assert_close(method.loss(step)["share_projections"], torch.stack(total).mean())
    if way == "down":
        with torch.no_grad():
            for place, other in enumerate((1, 3)):
                for role, pair in pairs.items():
                    ours = part(phase.encoder.backbone, layers(phase.encoder.backbone)[place], role).module.weight
                    ours.copy_(pair(part(teacher.backbone, layers(teacher.backbone)[other], role).module.weight))
        assert method.loss(step)["share_projections"].item() < 1e-12
