"""Masked-LM training: what is hidden, what is learned from it, and that a kill changes nothing."""

import numpy as np
import pytest
import torch
from test_resume import counted, killed_at
from torch.nn import functional
from toys import is_same_state, phase_of, run, small, toy_task, trajectory
from transformers import AutoConfig, AutoModelForMaskedLM

from smallbert.errors import UserError
from smallbert.model.folders import load_folder, save_folder
from smallbert.model.heads import IGNORE, UNKNOWN
from smallbert.model.words import WORDS, need_word_head, put_word_head
from smallbert.texts.batches import Layout, make_batch
from smallbert.texts.corpus import Blocks, check_text, lines_of, masked_stream, read_blocks
from smallbert.texts.data import STUDENT, Tokens
from smallbert.tiny import SHAPES, make_tokenizer
from smallbert.training.loop import _Plan

LINES = [
    "the film seems very warm and the story feels lovely",
    "this plot was rather dull but the music is bright",
    "",
    "that ending looks clumsy",
    "it was a very slow scene with flat acting and a poor idea and so the cast seems cold and grey and weak to us",
]
MASK, SPECIAL = 4, range(5)
TASK = toy_task("classify", 24)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n".join(LINES * 4))
    return path


def blocks_of(path, length=16, tokenizer=None):
    return read_blocks(tokenizer or make_tokenizer(), lines_of(str(path), None, "pretrain"), length)


def pieces(words=("film", "##s", "##et", "the", "seem", "un", "##kind", "##ly")):
    """A tokenizer that cuts words into pieces."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    made = Tokenizer(models.WordPiece({name: number for number, name in enumerate(names)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0", pair=None, special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {f"{name.lower()}_token": f"[{name}]" for name in ("PAD", "UNK", "CLS", "SEP", "MASK")}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def test_blocks_hold_whole_lines_of_one_document(text):
    tokenizer, blocks = make_tokenizer(), blocks_of(text, 24)
    rows = [tokenizer.decode(blocks.tokens.ids[a:b]) for a, b in zip(*_bounds(blocks), strict=True)]
    assert rows[0] == f"[CLS] {LINES[0]} {LINES[1]} [SEP]"
    assert rows[1] == f"[CLS] {LINES[3]} [SEP]"  # the line behind it does not fit, and is no part of the next document
    assert rows[2].startswith("[CLS] it was a very") and blocks.tokens.lengths.max() <= 24
    words = " ".join(" ".join(LINES).split() * 4)
    assert " ".join(" ".join(rows).replace("[CLS]", "").replace("[SEP]", "").split()).replace("[UNK]", "us") == words


def test_longer_lines_are_cut_between_two_words(tmp_path):
    (tmp_path / "long.txt").write_text("the unkindly films unkindly the unkind")  # 1 + 3 + 2 + 3 + 1 + 2 pieces
    tokenizer = pieces()

    def rows(length):
        blocks = blocks_of(tmp_path / "long.txt", length, tokenizer)
        ids = [blocks.tokens.ids[a + 1 : b - 1] for a, b in zip(*_bounds(blocks), strict=True)]
        return [" ".join(tokenizer.convert_ids_to_tokens(some.tolist())) for some in ids]

    assert rows(7) == ["the un ##kind ##ly", "film ##s un ##kind ##ly", "the un ##kind"]  # five pieces have room
    assert rows(6) == ["the un ##kind ##ly", "film ##s", "un ##kind ##ly the", "un ##kind"]
    assert rows(4)[:4] == ["the", "un ##kind", "##ly", "film ##s"]  # a word that no block has room for is cut


def _bounds(blocks):
    return blocks.tokens.offsets[:-1], blocks.tokens.offsets[1:]


def test_masks_are_a_function_of_seed_and_place(text):
    blocks = blocks_of(text)
    stream = masked_stream(blocks, 0.3, False, False)
    index = np.arange(len(blocks.tokens))
    one, again, other = stream.draw(index, 5), stream.draw(index, 5), stream.draw(index, 6)
    assert np.array_equal(one.views[STUDENT].ids, again.views[STUDENT].ids) and np.array_equal(one.labels, again.labels)
    assert not np.array_equal(one.labels, other.labels)
    alone = stream.draw(index[3:4], 5)  # the same block in other company, as on another process
    mine = one.views[STUDENT].places(index[3:4])
    assert np.array_equal(alone.labels, one.labels[mine])
    assert np.array_equal(alone.views[STUDENT].ids, one.views[STUDENT].ids[mine])
    assert np.array_equal(stream.views[STUDENT].ids, blocks_of(text).tokens.ids)  # the text itself stays as it is


@pytest.mark.parametrize("packed", [False, True])
def test_special_tokens_and_padding_are_never_hidden(text, packed):
    stream = masked_stream(blocks_of(text), 0.5, False, False)
    for seed in range(20):
        drawn, index = stream.at(np.arange(5), seed)
        batch = make_batch(drawn, index, Layout(packed, 16, grain=32), slots=7)
        truth = make_batch(blocks_as_stream(stream), np.arange(5), Layout(packed, 16, grain=32), slots=7)
        chosen = batch.places[batch.labels != IGNORE]
        original = truth.input_ids.flatten()[chosen]
        assert torch.equal(original, batch.labels[batch.labels != IGNORE])
        assert not torch.isin(original, torch.tensor(list(SPECIAL))).any() and truth.tokens().flatten()[chosen].all()
        rest = torch.ones(batch.input_ids.numel(), dtype=torch.bool)
        rest[chosen] = False
        assert torch.equal(batch.input_ids.flatten()[rest], truth.input_ids.flatten()[rest])
        assert len(batch.places) % 64 == 0 and len(chosen.unique()) == len(chosen) == drawn.units(index)


def blocks_as_stream(stream):
    from smallbert.texts.data import Stream

    return Stream(stream.views, None, "words")


@pytest.mark.parametrize("share", [0.15, 0.4])
def test_the_share_is_right_and_so_are_eighty_ten_ten(tmp_path, share):
    (tmp_path / "long.txt").write_text("\n\n".join(" ".join(LINES) for _ in range(400)))
    blocks = blocks_of(tmp_path / "long.txt", 42)
    index = np.arange(len(blocks.tokens))
    drawn = masked_stream(blocks, share, False, False).draw(index, 1)
    free = int((~blocks.special[blocks.tokens.ids]).sum())
    chosen = drawn.labels != IGNORE
    assert chosen.sum() / free == pytest.approx(share, rel=0.05)
    now, then = drawn.views[STUDENT].ids[chosen], blocks.tokens.ids[chosen]
    assert (now == MASK).mean() == pytest.approx(0.8, abs=0.02)
    assert ((now != MASK) & (now != then)).mean() == pytest.approx(0.1, abs=0.02)
    assert not np.isin(now[now != MASK], list(SPECIAL)).any()
    counts = [int(chosen[a:b].sum()) for a, b in zip(*_bounds(blocks), strict=True)]
    wanted = [max(1, round(share * (b - a - 2))) for a, b in zip(*_bounds(blocks), strict=True)]
    assert max(abs(a - b) for a, b in zip(counts, wanted, strict=True)) <= 1  # words that are [UNK] are not counted


def test_words_are_swapped_for_any_of_the_vocabulary(tmp_path):
    (tmp_path / "long.txt").write_text("\n".join(LINES * 400))
    blocks = blocks_of(tmp_path / "long.txt", 42)
    drawn = masked_stream(blocks, 1.0, False, False).draw(np.arange(len(blocks.tokens)), 1)
    now, then = drawn.views[STUDENT].ids, blocks.tokens.ids
    swapped = now[(now != MASK) & (now != then)]
    counts = np.bincount(swapped, minlength=len(blocks.special))[~blocks.special]
    assert len(swapped) > 1000 and counts.min() > 0 and counts.max() < 3 * counts.mean()


def test_whole_words_are_hidden_whole(tmp_path):
    (tmp_path / "words.txt").write_text("\n\n".join(["films unkindly the filmset seem unkind the the"] * 200))
    blocks = blocks_of(tmp_path / "words.txt", 32, pieces())
    index = np.arange(len(blocks.tokens))
    one = lambda whole: masked_stream(blocks, 0.25, whole, False).draw(index, 3).labels != IGNORE  # noqa: E731
    word = np.cumsum(blocks.begins)
    parts = [np.bincount(word, one(whole)) % np.bincount(word).clip(1) for whole in (True, False)]
    assert not parts[0].any() and parts[1].any()
    # films 2, unkindly 3, the 1, filmset 3, seem 1, unkind 2, the 1, the 1: fourteen pieces
    assert len(blocks.tokens.ids) == 200 * 16 and one(True).mean() * 16 / 14 == pytest.approx(0.25, rel=0.1)


def test_no_word_reaches_over_from_the_text_before():
    """Where the first piece of a word is unknown, and so never hidden, the rest of it is a word for itself."""
    ids = np.array([2, 5, 6, 3, 2, 1, 7, 8, 3], np.int32)  # [CLS] a b [SEP], [CLS] [UNK] ##c d [SEP]
    tokens = Tokens(ids, np.zeros(9, np.uint8), np.array([0, 4, 9]))
    blocks = Blocks(tokens, np.array([1, 1, 1, 1, 1, 1, 0, 1, 1], bool), np.arange(9) < 5, MASK)
    stream = masked_stream(blocks, 0.5, True, False)
    for seed in range(8):
        both = stream.draw(np.array([0, 1]), seed).labels
        assert (both[:4] != IGNORE).sum() == (both[4:] != IGNORE).sum() == 1  # of two words in each
        assert np.array_equal(stream.draw(np.array([1]), seed).labels, both[4:])


def test_every_block_has_something_hidden_however_long_its_words_are(tmp_path):
    (tmp_path / "words.txt").write_text(
        "\n\n".join(["unkindly filmset", "filmset", "the", "the seem the unkindly"] * 50)
    )
    blocks = blocks_of(tmp_path / "words.txt", 8, pieces())
    index, row = np.arange(len(blocks.tokens)), np.repeat(np.arange(len(blocks.tokens)), blocks.tokens.lengths)
    for whole in (True, False):
        for seed in range(5):
            labels = masked_stream(blocks, 0.15, whole, False).draw(index, seed).labels
            hidden = np.bincount(row, labels != IGNORE)
            assert hidden.min() == 1 and (hidden <= (3 if whole else 1)).all()
            alone = [masked_stream(blocks, 0.15, whole, False).draw(index[k : k + 1], seed).labels for k in index]
            assert (np.concatenate(alone) == labels).all()


@pytest.mark.parametrize("front", ["", "mix_layers | ", "gate_layers | "])
@pytest.mark.parametrize("tokens", ["masked", "all"])
def test_the_loss_is_that_of_a_reference(text, front, tokens):
    phase = phase_of(f"{front}pretrain({str(text)!r}, batch=4, length=16, tokens={tokens!r})", small(), None)
    phase.encoder.eval()
    batches = _Plan(phase.stream, Layout(False, 16), 4, 0, _alone()).batches(3, torch.device("cpu"))
    drawn = batches[STUDENT]
    with torch.no_grad():
        loss = phase.loss(batches)
        hidden = phase.encoder.output(phase.encoder.states(drawn), drawn)
        head, total, count = phase.encoder.heads[WORDS], 0.0, 0
        table = phase.encoder.backbone.embeddings.word_embeddings.weight
        for place, label in zip(drawn.places.tolist(), drawn.labels.tolist(), strict=True):
            if label < 0:
                continue
            one = hidden.flatten(0, 1)[place]
            one = functional.layer_norm(
                functional.gelu(head.dense(one)), (16,), head.norm.weight, head.norm.bias, 1e-12
            )
            scores = table @ one + head.bias
            total, count = total - scores.log_softmax(0)[label], count + 1
    torch.testing.assert_close(loss, total / count, atol=1e-6, rtol=1e-5)
    assert count and (tokens == "all") == bool((drawn.labels == UNKNOWN).any())


def test_watch_tells_the_mean_over_the_same_hidden_words_each_time(text):
    recipe = f"pretrain({str(text)!r}, steps=6, batch=4, length=16, lr={{}}) + watch(2, examples=5)"
    watched = [run(recipe.format(lr), small(), None).traces["watch"] for lr in (1e-12, 1e-2)]
    still, learning = ([look["value"]["loss"] for look in looks] for looks in watched)
    phase = phase_of(recipe.format(1e-12), small(), None)
    phase.encoder.eval()
    drawn, index = phase.stream.at(np.random.default_rng(0).permutation(len(phase.stream))[:5], 0)
    batch = make_batch(drawn, index, Layout(False, 0))
    with torch.no_grad():
        scores = phase.encoder(batch, WORDS)[: int((batch.labels >= 0).sum())]
        expected = functional.cross_entropy(scores, batch.labels[: len(scores)])
    assert still == [pytest.approx(float(expected), abs=1e-3)] * 3
    assert learning[2] < learning[1] < learning[0] < still[0]


def test_packed_and_padded_batches_have_the_same_loss(text):
    phase = phase_of(f"mix_layers | pretrain({str(text)!r}, length=16)", small(), None)
    phase.encoder.eval()
    drawn, index = phase.stream.at(np.array([2, 0, 5, 1]), 9)
    count = {"count": torch.tensor(float(drawn.units(index)))}
    layouts = (Layout(False, 16), Layout(False, 16, multiple=16), Layout(True, 16, grain=32))
    with torch.no_grad():
        one, *others = [
            phase.loss({STUDENT: make_batch(drawn, index, how, slots=6).with_tensors(count)}) for how in layouts
        ]
    for other in others:
        torch.testing.assert_close(other, one, atol=1e-6, rtol=1e-5)


def _alone():
    from smallbert.machine.processes import processes

    return processes()


def test_it_takes_the_models_own_head_and_guesses_as_hugging_face_does(family, tmp_path):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SHAPES[family])
    model = AutoModelForMaskedLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.tie_weights()
    model.save_pretrained(tmp_path / "theirs")
    make_tokenizer().save_pretrained(tmp_path / "theirs")
    encoder = load_folder(tmp_path / "theirs")
    if family == "mobilebert":  # its own has a matrix beside the word embedding, and is not taken
        assert not encoder.spare and put_word_head(encoder.copy()) == "new"
        return
    assert not encoder.heads and put_word_head(encoder.copy()) == "its model file"
    ids = torch.tensor([[2, 9, 4, 11, 12, 3], [2, 30, 31, 4, 8, 3]])
    from smallbert.model.batch import Batch

    places = torch.arange(12)
    batch = Batch(ids, torch.zeros_like(ids), torch.arange(6).repeat(2, 1), size=2, longest=6, places=places)
    need_word_head(encoder, "it")
    with torch.no_grad():
        theirs = model(input_ids=ids).logits.flatten(0, 1)
        torch.testing.assert_close(encoder(batch, WORDS), theirs, atol=1e-5, rtol=1e-4)


def test_a_tiny_corpus_is_learned_by_heart(tmp_path):
    (tmp_path / "text.txt").write_text("\n\n".join(LINES[:2] * 4))
    recipe = f"pretrain({str(tmp_path)!r}, steps=300, lr=0.005, batch=8, dropout=0.0, length=32)"
    losses, outcome = trajectory(recipe, small(), None)
    assert outcome.steps == 300 and losses[0] > 4 and losses[-1] < 1.0
    assert not outcome.encoder.heads and "the masked-LM head is new" in outcome.notes


def test_the_head_is_kept_when_asked(text, tmp_path):
    recipe = f"pretrain({str(text)!r}, steps=4, length=16, batch=4, keep_head=True)"
    made = run(recipe, small("albert"), None).encoder
    save_folder(made, tmp_path / "model")
    again = load_folder(tmp_path / "model")
    assert is_same_state(made, again) and again.heads[WORDS].words is again.backbone.embeddings.word_embeddings
    later = run(f"pretrain({str(text)!r}, steps=4, length=16, batch=4)", again, None).encoder
    assert WORDS in later.heads and not torch.equal(later.heads[WORDS].bias, made.heads[WORDS].bias)


def test_a_task_head_rests_and_the_teacher_stays_the_finetuned_one(text):
    task = toy_task("classify", 24)
    tuned = run("finetune(epochs=1, batch=8)", small(), task).encoder
    read = f"pretrain({str(text)!r}, steps=4, length=16, batch=4, lr=0.01)"
    later = run(read, tuned, task, judge=False).encoder
    assert all(torch.equal(a, b) for a, b in zip(later.head.parameters(), tuned.head.parameters(), strict=True))
    found = run(f"{read} | distill(alpha=1.0) + train(epochs=1, batch=8, lr=1e-9)", tuned, task)
    assert found.steps == 7  # the default teacher is `tuned`, not what has just read


@pytest.mark.parametrize("tokens", ["masked", "all"])
def test_a_teacher_teaches_words(text, tmp_path, tokens):
    teacher = run(
        f"pretrain({str(text)!r}, steps=30, length=16, batch=4, lr=0.01, keep_head=True)", small(), None
    ).encoder
    read = f"pretrain({str(text)!r}, steps=10, length=16, batch=4, tokens={tokens!r}, dropout=0.0)"
    phase = phase_of(f"mark('t') | distill(teacher='t', alpha=1.0) + {read}", teacher, None)
    batches = _Plan(phase.stream, Layout(False, 16), 4, 0, _alone()).batches(0, torch.device("cpu"))
    assert phase.loss(batches).abs() < 1e-6  # who is his own teacher has nothing to learn
    save_folder(teacher, tmp_path / "teacher")
    student = small("bert", 1, seed=7)
    taught = f"distill(teacher={str(tmp_path / 'teacher')!r}, alpha=0.5, temperature=3.0) + {read}"
    phase = phase_of(taught, student, None)
    phase.encoder.eval()
    with torch.no_grad():
        ours, theirs = phase.encoder(batches[STUDENT], WORDS), teacher(batches[STUDENT], WORDS)
        real = batches[STUDENT].labels != IGNORE
        apart = functional.kl_div((ours / 3).log_softmax(-1), (theirs / 3).softmax(-1), reduction="none").sum(-1)[real]
        hidden = batches[STUDENT].labels >= 0
        known = functional.cross_entropy(ours[hidden], batches[STUDENT].labels[hidden])
        torch.testing.assert_close(phase.loss(batches), 0.5 * 9 * apart.mean() + 0.5 * known, atol=1e-5, rtol=1e-4)
    assert not is_same_state(run(taught, student, None).encoder, student)
    with pytest.raises(UserError, match="no masked-LM head"):
        run(f"mark('t') | distill(teacher='t') + {read}", student, None)


@pytest.mark.parametrize("tokens", ["masked", "all"])
def test_layers_are_aligned_where_words_are_hidden(text, tmp_path, tokens):
    """The mean over blocks of each block's own mean over hidden words, in every layout."""
    teacher, student = small(layers=3, seed=5), small(layers=2)
    save_folder(teacher, tmp_path / "teacher")
    aligned = f"align(tokens='masked', layers={{-1: -1}}, task=0.0, teacher={str(tmp_path / 'teacher')!r})"
    phase = phase_of(f"{aligned} + pretrain({str(text)!r}, length=16, tokens={tokens!r})", student, None)
    phase.encoder.eval()
    drawn, index = phase.stream.at(np.array([2, 0, 5, 1]), 9)
    each = []
    with torch.no_grad():
        for number in index:
            one = index[number : number + 1]
            batch, labels = make_batch(drawn, one, Layout(False, 16)), drawn.labels[drawn.views[STUDENT].places(one)]
            apart = (student.states(batch).last - teacher.states(batch).last)[0].square().mean(-1)
            each.append(float(apart[torch.from_numpy(labels >= 0)].mean()))
        for how in (Layout(False, 16), Layout(False, 16, multiple=16), Layout(True, 16, grain=32)):
            found = phase.loss({STUDENT: make_batch(drawn, index, how, slots=6)})
            assert float(found) == pytest.approx(np.mean(each), rel=1e-4)


def test_a_new_model_or_vocabulary_has_no_use_for_the_old_head(text, tmp_path):
    read = f"pretrain({str(text)!r}, steps=2, length=16, batch=4, keep_head=True)"
    for student in ("student(1, width=8, start='slice')", "bottleneck(1, 16, 8, 2, ffn=16, embed=4)", "lstm(6)"):
        made = run(f"{read} | {student}", small(), toy_task("classify", 8)).encoder
        assert list(made.heads) == ["task"]
    made = run(f"{read} | small_vocabulary(60) | {read}", small(), toy_task("classify", 8)).encoder
    assert made.heads[WORDS].outputs == len(made.backbone.embeddings.word_embeddings.weight) <= 60
    save_folder(made, tmp_path / "made")
    assert is_same_state(load_folder(tmp_path / "made"), made)


def test_two_heads_are_not_learned_in_one_phase(text):
    recipe = f"pool_layers(detach=True) + pretrain({str(text)!r}, steps=2)"
    with pytest.raises(UserError, match="both choose what is learned"):
        run(recipe, small(), toy_task("classify", 8))


def test_a_backbone_that_reads_hidden_words_runs_at_every_step(text):
    recipe = f"pretrain({str(text)!r}, epochs=2, length=16, freeze='backbone', batch=4)"
    found = run(recipe, small(), None)
    assert any("drawn anew" in note for note in found.notes)


def test_resumed_is_equal_to_the_bit(text, tmp_path):
    recipe = f"mix_layers | pretrain({str(text)!r}, steps=12, length=16, batch=4, lr=0.003, whole_words=True)"
    with killed_at(7):
        run(recipe, small(), None, work=tmp_path / "work", pause=0.0)
    with counted() as taken:
        again = run(recipe, small(), None, work=tmp_path / "work", pause=0.0)
    assert [step for step, _ in taken] == [7, 8, 9, 10, 11]
    assert is_same_state(again.encoder, run(recipe, small(), None).encoder)


def test_work_on_another_text_is_not_taken_over(text, tmp_path):
    recipe = f"pretrain({str(text)!r}, steps=3, length=16, batch=4)"
    first = run(recipe, small(), None, work=tmp_path / "work")
    with counted() as taken:
        run(recipe, small(), None, work=tmp_path / "work")
        assert not taken
        text.write_text("the cast was cold")
        other = run(recipe, small(), None, work=tmp_path / "work")
    assert len(taken) == 3 and not is_same_state(first.encoder, other.encoder)
    assert first.encoder.history[0]["plan"]["text"] != other.encoder.history[0]["plan"]["text"]


def test_settings_that_cannot_work_are_refused(text, tmp_path):
    for recipe, words in {
        "pretrain": "give --task",
        "pretrain('nowhere.txt')": "no file or folder",
        f"pretrain({str(text)!r}, share=1.5)": "between 0 and 1",
        f"pretrain({str(text)!r}, length=2)": "at least 8",
        f"pretrain({str(text)!r}, cache='words')": "leave cache out",
    }.items():
        with pytest.raises(UserError, match=words):
            run(recipe, small(), None)
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(UserError, match="no text in"):
        run(f"pretrain({str(tmp_path / 'empty.txt')!r})", small(), None)


def test_a_file_that_is_no_text_is_named_wherever_it_stands(tmp_path):
    folder, before = tmp_path / "folder", run("finetune(epochs=1)", small(), TASK, judge=False).encoder
    folder.mkdir()
    (folder / "a.txt").write_text("\n".join(LINES * 240))
    noise = np.random.default_rng(0).integers(0, 256, 300_000, dtype=np.uint8).tobytes()
    recipes = (
        "pretrain({!r}, steps=1, batch=2)",
        "small_vocabulary(40, text={!r})",
        "trim_vocabulary(text={!r})",
        "unlabelled({!r}) + distill",
    )
    for name, content in {
        "b.bin": noise,
        "latin.txt": "café über\n".encode("latin-1"),
        "wide.txt": "the film\n".encode("utf-16"),
        "long.txt": noise.replace(b"\n", b""),
    }.items():
        (folder / name).write_bytes(content)
        for recipe in recipes:
            words = rf"{name} is not plain text in UTF-8; convert it first, or take it out of the folder"
            with pytest.raises(UserError, match=words):
                run(recipe.format(str(folder)), before, TASK)
        (folder / name).unlink()


def test_text_that_ends_in_the_middle_of_a_character_where_it_is_looked_at_is_text(tmp_path):
    for shift in range(3):
        for line in ("€" * 40_000, "ä€ film\n" * 10_000):
            (tmp_path / "text.txt").write_text("\ufeff" * (shift == 0) + "a" * shift + line, encoding="utf-8")
            check_text(str(tmp_path / "text.txt"), "pretrain")
    (tmp_path / "text.txt").write_text("\ufffd\n" * 20)  # a character like others, though a sad one
    check_text(str(tmp_path / "text.txt"), "pretrain")
    (tmp_path / "text.txt").write_text("\n" * 70_000)
    with pytest.raises(UserError, match="no text in"):
        run(f"pretrain({str(tmp_path / 'text.txt')!r}, steps=1)", small(), None)


@pytest.mark.parametrize(
    "recipe",
    [
        "pretrain({!r}, steps=1, batch=2, length=16)",
        "small_vocabulary(60, text={!r})",
        "add_vocabulary(60, text={!r})",
        "trim_vocabulary(text={!r})",
        "unlabelled({!r}) + distill + train(epochs=1)",
    ],
)
def test_lines_that_are_no_text_are_counted(recipe, tmp_path):
    (tmp_path / "a.txt").write_text("the film seems very warm\n" * 3000)
    with (tmp_path / "a.txt").open("ab") as file:
        file.write("the café\n".encode("latin-1") * 3 + b"a \0 film\n")
    (tmp_path / "b.txt").write_text("the plot was dull \ufffd\n")
    before = run("finetune(epochs=1)", small(), TASK, judge=False).encoder
    notes = run(recipe.format(str(tmp_path)), before, TASK, judge=False).notes
    said = "4 of 3,005 lines of text hold bytes that are not UTF-8, or NUL; line 3,001 of "
    assert [note for note in notes if "NUL" in note] == [f"{said}{tmp_path / 'a.txt'} is the first"]
