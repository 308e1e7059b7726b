"""Two vocabularies in one model: rows, words cut by one or the other, what is kept of them, and projected words."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_resume import counted, killed_at
from toys import batch_of, is_same_state, phase_of, run, scores_of, small, stream_of, toy_task

from smallbert.errors import UserError
from smallbert.making.estimate import estimate
from smallbert.model.anatomy import words
from smallbert.model.folders import load_folder, save_folder
from smallbert.model.heads import IGNORE
from smallbert.model.vocabulary import SPECIAL, same_pieces, second_cutter, second_rows
from smallbert.model.words import WORDS
from smallbert.texts.corpus import Mixing, lines_of, masked_stream, read_blocks
from smallbert.texts.data import STUDENT, tokenizer_key
from smallbert.tiny import make_encoder

LINES = [
    "the film seems very warm, and the story feels lovely",
    "this plot was rather dull but unlovely music is bright",
    "",
    "that ending looks clumsy and slow",
]
TASK = toy_task("pair", 16)
SIZE = 110


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_text("\n".join(LINES * 6))
    return str(path)


@pytest.fixture(scope="module")
def both(text):
    """A model that has a second vocabulary beside its own of a hundred words."""
    return run(f"add_vocabulary({SIZE}, text={text!r})", small(), TASK).encoder


def read(text, more="", steps=3):
    return f"pretrain({text!r}, steps={steps}, length=24, batch=4, lr=0.003{more})"


def blocks_of(encoder, text, share, seed=0, length=24):
    mixing = Mixing(second_cutter(encoder), encoder.backbone.config.vocab_size, share, seed)
    return read_blocks(encoder.tokenizer, lines_of(text, None, "pretrain"), length, mixing), mixing


def piece_at(encoder):
    """What each row stands for, the second vocabulary's pieces in brackets."""
    names = {row: piece for piece, row in encoder.tokenizer.get_vocab().items()}
    own = list(zip(encoder.second, second_rows(encoder), strict=True))[len(SPECIAL) :]
    return names | {row: f"<{piece}>" for piece, row in own}


# The rows


def test_the_second_vocabulary_has_the_last_rows(both, family):
    given = small(family)
    made = run(f"add_vocabulary({SIZE})", given, TASK).encoder
    table, old = words(made.backbone).weight, words(given.backbone).weight
    new = len(made.second) - len(SPECIAL)
    assert torch.equal(table[:100], old) and len(table) == 100 + new == made.backbone.config.vocab_size <= 95 + SIZE
    rows = dict(zip(made.second, second_rows(made), strict=True))
    known = made.tokenizer.get_vocab()
    assert all(rows[piece] == known[piece] < 100 for piece in made.second[: len(SPECIAL)])
    assert list(rows.values())[len(SPECIAL) :] == list(range(100, 100 + new))  # one behind the other
    assert rows["##s"] != rows["s"] and torch.equal(table[rows["film"]], old[known["film"]])  # begins as the old one
    assert tokenizer_key(made.tokenizer) == tokenizer_key(given.tokenizer)
    wanted = scores_of(run("head", given, TASK).encoder, TASK)
    assert torch.equal(scores_of(made, TASK), wanted)  # tasks read as before


def test_a_folder_holds_both(both, tmp_path):
    student = run("student(1, width=8, start='slice') | mark('here') | quantize", both, TASK).encoder
    for name, encoder in (("both", both), ("student", student)):
        save_folder(encoder, tmp_path / name)
        found = load_folder(tmp_path / name)
        assert found.second == encoder.second == both.second and second_rows(found) == second_rows(both)
        assert is_same_state(found, encoder) and tokenizer_key(found.tokenizer) == tokenizer_key(both.tokenizer)
    assert second_cutter(found)("unlovely") == second_cutter(both)("unlovely") != []
    taken = run(f"student(model={str(tmp_path / 'both')!r})", small("electra"), TASK).encoder
    assert taken.second == both.second
    plain = run(f"student(model={str(save(small('electra'), tmp_path / 'plain'))!r})", both, TASK).encoder
    assert plain.second == []


def save(encoder, path):
    save_folder(encoder, path)
    return path


def test_a_head_for_words_grows_with_the_table(text, tmp_path):
    plain = run(read(text, ", keep_head=True"), small(), TASK).encoder
    made = run(f"add_vocabulary({SIZE}, text={text!r})", plain, TASK).encoder
    head, old = made.heads[WORDS], plain.heads[WORDS]
    assert head.words is words(made.backbone) and torch.equal(head.dense.weight, old.dense.weight)
    the = dict(zip(made.second, second_rows(made), strict=True))["the"]
    assert torch.equal(head.bias[:100], old.bias) and head.bias[the] == old.bias[made.tokenizer.get_vocab()["the"]]
    save_folder(made, tmp_path / "made")
    assert is_same_state(load_folder(tmp_path / "made"), made)


# The words


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_whole_words_are_cut_by_the_second_with_that_chance(both, tmp_path, share):
    sentence = "the films seem unlovely and the stories feel warm, warm and moving"
    path = tmp_path / "long.txt"
    path.write_text("\n\n".join([sentence] * 400))
    blocks, mixing = blocks_of(both, str(path), share, length=64)
    total = 400 * 13
    assert mixing.words == total and mixing.chosen / total == pytest.approx(share, abs=4 * np.sqrt(0.25 / total))
    cut, first = second_cutter(both), both.tokenizer
    ways = [(first(word, add_special_tokens=False)["input_ids"], cut(word)) for word in words_of(sentence)]
    begins = np.flatnonzero(blocks.begins)
    found = [ids.tolist() for ids in np.split(blocks.tokens.ids, begins[1:])]
    inner = [word for word in found if word[0] not in (2, 3)]  # all but [CLS] and [SEP]
    assert len(inner) == total
    second = [ways[place % 13].index(word) for place, word in enumerate(inner)]  # a word as one or the other has it
    assert max(len(way[1]) for way in ways) > 2 and np.mean(second) == pytest.approx(share, abs=0.03)
    assert len({tuple(second[start : start + 13]) for start in range(0, total, 13)}) > 100  # each place on its own


def words_of(sentence):
    return sentence.replace(",", " ,").split()


def test_the_cut_is_a_function_of_the_seed(both, text):
    one, again, other = (blocks_of(both, text, 0.5, seed)[0].tokens.ids for seed in (1, 1, 2))
    assert np.array_equal(one, again) and not np.array_equal(one, other)
    every, none = (blocks_of(both, text, share)[0].tokens.ids for share in (1.0, 0.0))
    names = piece_at(both)
    shown = " ".join(names[number] for number in every)
    assert shown.startswith("[CLS] <the> <fil> <##m> <see> <##ms> ") and set(every[every < 100]) == {2, 3}
    plain = read_blocks(both.tokenizer, lines_of(text, None, "pretrain"), 24)
    assert np.array_equal(none, plain.tokens.ids) and none.max() < 100


def test_words_of_both_are_hidden_and_guessed(both, text):
    blocks, _ = blocks_of(both, text, 0.5)
    index = np.arange(len(blocks.tokens))
    drawn = masked_stream(blocks, 0.4, True, False).draw(index, 3)
    chosen = drawn.labels != IGNORE
    assert np.array_equal(drawn.labels[chosen], blocks.tokens.ids[chosen])
    assert (drawn.labels[chosen] >= 100).any() and (drawn.labels[chosen] < 100).any()
    word = np.cumsum(blocks.begins)
    assert not (np.bincount(word, chosen) % np.bincount(word).clip(1)).any()  # whole words, whoever cut them
    phase = phase_of(read(text), both, TASK)
    assert phase.encoder.heads[WORDS].outputs == both.backbone.config.vocab_size
    assert any("the second vocabulary splits" in note for note in phase.notes)


def test_nothing_mixed_is_plain_pretraining(both, text):
    """To the last bit: the text is the same, and so are words that stand in for others."""
    mixed = phase_of(read(text, ", mixed=0.0"), both, TASK).stream
    plain = phase_of(read(text), small(), TASK).stream
    index = np.arange(len(plain))
    for seed in range(3):
        ours, theirs = mixed.draw(index, seed), plain.draw(index, seed)
        assert np.array_equal(ours.views[STUDENT].ids, theirs.views[STUDENT].ids)
        assert np.array_equal(ours.labels, theirs.labels)
    forgotten = both.copy()
    forgotten.second = []
    one, other = run(read(text, ", mixed=0.0"), both, TASK).encoder, run(read(text), forgotten, TASK).encoder
    assert is_same_state(one, other) and not is_same_state(one, run(read(text), both, TASK).encoder)


def test_pretraining_without_a_file_reads_the_task(both):
    phase = phase_of("pretrain(length=60)", both, TASK)
    rows = TASK.split("train")
    plain = phase_of("pretrain(mixed=0.0, length=24)", both, TASK).stream.views[STUDENT]
    first = both.tokenizer.decode(plain.ids[: plain.offsets[1]])
    assert first == f"[CLS] {rows.texts[0]} {rows.pairs[0]} [SEP]" and len(phase.stream) == len(plain) == len(rows)
    assert (phase.stream.views[STUDENT].ids >= 100).any()


def test_resumed_is_equal_to_the_bit(text, tmp_path):
    recipe = f"add_vocabulary({SIZE}, text={text!r}) | {read(text, ', whole_words=True', 12)}"
    with killed_at(7):
        run(recipe, small(), None, work=tmp_path / "work", pause=0.0)
    with counted() as taken:
        again = run(f"{recipe} | small_vocabulary", small(), None, work=tmp_path / "work", pause=0.0).encoder
        assert [step for step, _ in taken] == [7, 8, 9, 10, 11]
        later = run(f"{recipe} | small_vocabulary", small(), None, work=tmp_path / "work", pause=0.0).encoder
        assert len(taken) == 5  # the finished phase is taken over, with its second vocabulary
    whole = run(f"{recipe} | small_vocabulary", small(), None).encoder
    assert is_same_state(again, whole) and is_same_state(later, whole) and again.history == whole.history


# What stays


def test_the_second_vocabulary_is_kept_with_what_it_learned(both, text, tmp_path, family):
    learned = run(f"add_vocabulary({SIZE}) | {read(text)}", small(family), TASK).encoder
    kept = run("small_vocabulary", learned, TASK).encoder
    assert kept.second == [] and list(kept.tokenizer.get_vocab()) and len(kept.tokenizer) == len(learned.second)
    assert kept.backbone.config.vocab_size == len(learned.second) == len(words(kept.backbone).weight)
    sentence = "the unlovely films seem moving"
    ids = kept.tokenizer(sentence, add_special_tokens=False)["input_ids"]
    rows = [row for word in sentence.split() for row in second_cutter(learned)(word)]
    assert torch.equal(words(kept.backbone).weight[ids], words(learned.backbone).weight[rows])
    marks = [kept.tokenizer.cls_token_id, kept.tokenizer.sep_token_id]  # learned by the first's rows
    assert torch.equal(words(kept.backbone).weight[marks], words(learned.backbone).weight[[2, 3]])
    save_folder(kept, tmp_path / "kept")
    found = load_folder(tmp_path / "kept")
    assert is_same_state(found, kept) and torch.equal(scores_of(found, TASK), scores_of(kept, TASK))
    assert stream_of(found, TASK).views[STUDENT].ids.max() < len(kept.tokenizer)


def test_a_recipe_is_sized_up_without_data():
    found = estimate(small(), "add_vocabulary(60) | pretrain | student(1) | small_vocabulary(60)")
    assert found["fits"] and found["parameters"] == estimate(small(), "student(1) | small_vocabulary(60)")["parameters"]


# Projected words


@pytest.mark.parametrize("way", ["down", "up"])
def test_words_are_projected_by_the_pieces_they_stand_for(both, text, way):
    teacher = run(read(text), both, TASK).encoder
    shared = f"share_projections(way={way!r}, teacher='both', words=True) + train(batch=8)"
    recipe = f"mark('both') | student(2, width=8, start='slice') | small_vocabulary | {shared}"
    phase = phase_of(recipe, teacher, TASK)
    student, project = phase.encoder, phase.modules["share_projections"]["words"]
    numbers, rows = student.tokenizer.get_vocab(), dict(zip(teacher.second, second_rows(teacher), strict=True))
    assert dict(same_pieces(student, teacher)) == {number: rows[piece] for piece, number in numbers.items()}
    ours, theirs = words(student.backbone).weight, words(teacher.backbone).weight
    mine = theirs[[rows[piece] for piece in sorted(numbers, key=numbers.get)]]
    apart = (mine @ project.right - ours) if way == "down" else (mine - ours @ project.right)
    wanted = apart.square().mean()
    method = next(one for one in phase.methods if one.name == "share_projections")
    step = SimpleNamespace(phase=phase, penalty=lambda value: value)

    def loss(one):
        return one.loss(step)["share_projections"]

    matrices = 2 * 6
    without = loss(type(method)(**{**method.settings(), "words": False}))
    torch.testing.assert_close(loss(method), (without * matrices + wanted) / (matrices + 1))
    if way == "down":
        with torch.no_grad():
            ours.copy_(mine @ project.right)
        torch.testing.assert_close(loss(method), without * matrices / (matrices + 1))
    assert "left" not in dict(project.named_parameters()) and project.right.shape == ((16, 8), (8, 16))[way == "up"]


def test_rows_of_one_vocabulary_belong_to_the_same_one(both):
    """Whole and cut alike: the first's rows to the first's, the second's to the second's, though both know `the`."""
    assert same_pieces(both, both) == [(row, row) for row in range(100 + len(both.second) - len(SPECIAL))]
    other = make_encoder("bert", 3)
    assert same_pieces(both, other)[:100] == [(row, row) for row in range(100)]
    kept = run("small_vocabulary", both, TASK).encoder
    the = kept.tokenizer.get_vocab()["the"]
    assert dict(same_pieces(kept, both))[the] == second_rows(both)[both.second.index("the")] >= 100
    assert dict(same_pieces(kept, other))[the] == other.tokenizer.get_vocab()["the"]


def test_projected_words_are_learned(both):
    shared = "share_projections(weight=10.0, words=True) + train(epochs=1, batch=8)"
    tuned = "finetune(epochs=1, batch=8) | student(1, width=8, start='slice') | small_vocabulary"
    made = run(f"{tuned} | {shared}", both, TASK, judge=False)
    assert f"{len(both.second)} word pieces have rows" in " ".join(made.notes)
    assert torch.isfinite(made.encoder(batch_of(made.encoder, TASK))).all()


# What cannot be


def test_refusals(both, text):
    again = run("small_vocabulary", both, TASK).encoder
    for recipe, encoder, said in (
        (read(text, ", mixed=0.5"), small(), "needs? a second vocabulary; put add_vocabulary"),
        (read(text, ", mixed=0.5"), again, "put add_vocabulary"),
        (read(text, ", mixed=1.5"), both, "share of words"),
        ("add_vocabulary(60)", both, "has a second vocabulary already"),
        ("add_vocabulary(3)", small(), "above 10"),
        ("quantize | add_vocabulary(60)", small(), "add_vocabulary needs plain word embeddings"),
        ("quantize | small_vocabulary", both, "small_vocabulary needs plain word embeddings"),
        ("small_vocabulary(20)", both, rf"write small_vocabulary\({len(both.second)}\)"),
        (f"small_vocabulary(text={text!r})", both, "without a text"),
        (f"mark('a') | add_vocabulary(60) | {read(text)} + align(teacher='a')", small(), "after add_vocabulary"),
        ("mark('a') | quantize | share_projections(teacher='a', words=True) + train", both, "another form"),
    ):
        with pytest.raises(UserError, match=said):
            run(recipe, encoder, TASK)
    with pytest.raises(UserError, match="give --task"):
        run("add_vocabulary(60)", small(), None)
    with pytest.raises(UserError, match="give --task"):
        run("pretrain", small(), None)


# Tokenizers of other makes


def byte_pairs(lines):
    from tokenizers import ByteLevelBPETokenizer

    made = ByteLevelBPETokenizer(add_prefix_space=True)
    made.train_from_iterator(lines, vocab_size=300, special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    return made._tokenizer


def sentence_pieces(lines):
    from tokenizers import SentencePieceUnigramTokenizer

    made = SentencePieceUnigramTokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    made.train_from_iterator(lines, vocab_size=60, special_tokens=special, unk_token="<unk>", show_progress=False)
    return made._tokenizer


@pytest.mark.parametrize("make", [byte_pairs, sentence_pieces])
def test_words_are_those_of_the_first_tokenizer_whatever_its_make(make, text):
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    backend = make(LINES * 6)
    backend.post_processor = processors.TemplateProcessing("<s> $A </s>", None, [("<s>", 0), ("</s>", 2)])
    names = {"unk": "<unk>", "pad": "<pad>", "cls": "<s>", "sep": "</s>", "mask": "<mask>"}
    encoder = small("roberta", vocab_size=400)
    encoder.tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, **{f"{kind}_token": name for kind, name in names.items()}
    )
    both = run(f"add_vocabulary({SIZE}, text={text!r})", encoder, None).encoder
    blocks, mixing = blocks_of(both, text, 1.0, length=70)
    pieces = piece_at(both)
    shown = " ".join(pieces[number].strip("<>") for number in blocks.tokens.ids[: blocks.tokens.offsets[1]])
    assert shown.replace(" ##", "") == f"s {LINES[0].replace(',', ' ,')} {LINES[1]} /s"
    assert mixing.words == mixing.chosen and blocks.begins.sum() < len(blocks.begins)
