"""Fewer word pieces: which stay, that texts made of them are cut and scored as before, and what is written down."""

import json
import random
from functools import cache

import numpy as np
import pytest
import torch
import transformers
from test_resume import counted, killed_at
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from toys import check_refused, is_same_state, pairs, phase_of, run, scores_of, small, stream_of, toy_task
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from smallbert.errors import UserError
from smallbert.export import export_onnx
from smallbert.making.estimate import estimate
from smallbert.making.run import run_recipe
from smallbert.methods import METHODS
from smallbert.model.anatomy import words
from smallbert.model.folders import load_folder, save_folder
from smallbert.model.trimming import all_of, count_pieces, must_stay, trimmed
from smallbert.model.words import WORDS
from smallbert.texts.data import STUDENT
from smallbert.tiny import SHAPES

SHORT = "train(epochs=1, batch=8, lr=0.001)"
TASK = toy_task("pair", 16)
LINES = [
    "the film seems very warm, and the story feels lovely",
    "this plot was rather dull but unlovely music is bright",
    "that ending looks clumsy and slow; nobody laughs",
    "aaaaaaaa banana bandana abracadabra",
]
MORE = ["zebra quiz fjord vex", "unbearably warmest films dullness", "the unlovelier bananas", "x y z q"]
BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


def dressed(backend, names):
    """A tokenizer as a model comes with it: marks around texts, a mask that takes the space before it."""
    first, _, last, _, mask = names
    backend.add_special_tokens([AddedToken(mask, lstrip=True)])
    numbers = [(name, backend.token_to_id(name)) for name in (first, last)]
    backend.post_processor = processors.TemplateProcessing(
        f"{first} $A {last}", f"{first} $A {last} $B:1 {last}:1", numbers
    )
    special = dict(zip(("cls", "pad", "sep", "unk", "mask"), names, strict=True))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, model_max_length=64, **{f"{kind}_token": name for kind, name in special.items()}
    )


@cache  # its training breaks ties as it happens to
def word_pieces(size=150, lines=(*LINES, *MORE)):
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.train_from_iterator(lines * 4, trainers.WordPieceTrainer(vocab_size=size, special_tokens=BERT))
    return dressed(made, [BERT[2], BERT[0], BERT[3], BERT[1], BERT[4]])


@cache
def byte_pairs(size=340, lines=(*LINES, *MORE)):
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        lines * 4, trainers.BpeTrainer(vocab_size=size, special_tokens=ROBERTA, initial_alphabet=alphabet)
    )
    tokenizer = dressed(made, ROBERTA)
    tokenizer.backend_tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return tokenizer


@cache
def letter_pairs(size=120, lines=(*LINES, *MORE)):
    """Pairs of letters where a word's last letter is another than the same within it."""
    made = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Whitespace(), decoders.BPEDecoder(suffix="</w>")
    made.train_from_iterator(
        lines * 4, trainers.BpeTrainer(vocab_size=size, special_tokens=ROBERTA, end_of_word_suffix="</w>")
    )
    return dressed(made, ROBERTA)


@cache
def likely_pieces(size=110, lines=(*LINES, *MORE)):
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = ROBERTA[:4]  # the mask is behind all others, as XLM-R's is
    made.train_from_iterator(
        lines * 4, trainers.UnigramTrainer(vocab_size=size, special_tokens=special, unk_token="<unk>")
    )
    return dressed(made, ROBERTA)


def seen(tokenizer, texts):
    """What texts are cut into, by name."""
    return [tokenizer.convert_ids_to_tokens(ids) for ids in tokenizer(list(texts))["input_ids"]]


def made_of(tokenizer, texts, least=1):
    """The tokenizer that is left for texts, beside which pieces it has."""
    counts, whole = count_pieces(tokenizer, texts), all_of(tokenizer)
    chosen = must_stay(tokenizer).union(*(whole(piece) for piece, count in counts.items() if count >= least))
    return trimmed(tokenizer, sorted(chosen, key=tokenizer.get_vocab().__getitem__), "trim_vocabulary")


CUTTERS = [word_pieces, byte_pairs, letter_pairs, likely_pieces]
MAKES = pytest.mark.parametrize("make", CUTTERS)


# Which pieces stay


def test_word_pieces_by_hand():
    names = ["[PAD]", "bbb", *BERT[1:], "a", "b", "##a", "##b", "##c", "ab", "##ab", "##bc", "abab", "bb", "##é"]
    backend = Tokenizer(models.WordPiece(_numbered(names), unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.add_tokens(["<new>"])
    old = dressed(backend, [BERT[2], BERT[0], BERT[3], BERT[1], BERT[4]])
    assert old.tokenize("abab abc bb ab") == ["abab", "ab", "##c", "bb", "ab"]
    new = made_of(old, ["ab abc", "ab <new> a"])
    assert count_pieces(old, ["ab abc", "ab <new> a"]) == {"ab": 3, "##c": 1, "<new>": 1, "a": 1}
    assert sorted(new.get_vocab(), key=new.get_vocab().get) == [
        *BERT, "a", "b", "##a", "##b", "##c", "ab", "##é", "<new>"
    ]  # fmt: skip
    assert new.tokenize("abab abc bb ab <new>") == ["ab", "##a", "##b", "ab", "##c", "b", "##b", "ab", "<new>"]
    assert new("ab [MASK]")["input_ids"] == [2, 10, 4, 3]


def test_marks_around_texts_get_their_new_numbers():
    names = ["[PAD]", "aaa", "aa", *BERT[1:], "a", "##a"]
    marks = [("[SEP]", 5), ("[CLS]", 4)]
    spaces = processors.ByteLevel()
    for post in (
        processors.BertProcessing(*marks),
        processors.RobertaProcessing(*marks),
        processors.TemplateProcessing("[CLS] $A [SEP]", None, marks),
        processors.Sequence([spaces, processors.TemplateProcessing("[CLS] $A [SEP]", None, marks)]),
    ):
        backend = Tokenizer(models.WordPiece(_numbered(names), unk_token="[UNK]"))
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        old = dressed(backend, [BERT[2], BERT[0], BERT[3], BERT[1], BERT[4]])
        old.backend_tokenizer.post_processor = post
        assert old("aa")["input_ids"] == [4, 2, 5] and made_of(old, ["a"])("aa")["input_ids"] == [2, 5, 6, 3]


def test_a_piece_stays_if_its_letters_do_not_spell_it():
    names = [*BERT, "a", "##a", "ax", "##xa", "aa"]  # there is no ##x
    backend = Tokenizer(models.WordPiece(_numbered(names), unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    new = made_of(dressed(backend, [BERT[2], BERT[0], BERT[3], BERT[1], BERT[4]]), ["a"])
    assert set(names) - set(new.get_vocab()) == {"aa"} and new.tokenize("ax aa") == ["ax", "a", "##a"]


def test_byte_pairs_by_hand():
    """A piece brings all that it is joined from, in the order of joining; another way to the same piece is no need."""
    letters, merges = [*"abcd"], [("b", "c"), ("a", "b"), ("a", "bc"), ("abc", "d"), ("ab", "c"), ("c", "d")]
    names = [*ROBERTA, *letters, "bc", "ab", "abc", "abcd", "cd"]
    backend = Tokenizer(models.BPE(_numbered(names), merges, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    old = dressed(backend, ROBERTA)
    assert all_of(old)("abcd") == {*letters, "bc", "abc", "abcd"} - set(letters) and all_of(old)("ab") == {"ab"}
    new = made_of(old, ["abcd"])
    assert set(names) - set(new.get_vocab()) == {"ab", "cd"}
    assert new.tokenize("abcd ab bcd") == ["abcd", "a", "b", "bc", "d"] and old.tokenize("ab") == ["ab"]


def test_likely_pieces_by_hand():
    pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("a", -2.0), ("b", -3.0), ("ab", -1.0)]
    pieces += [("aab", -2.5), ("ba", -9.0), ("éa", -4.0)]
    backend = Tokenizer(models.Unigram(pieces, unk_id=3, byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    old = dressed(backend, ROBERTA)
    new = made_of(old, ["ab b"])
    left = {name for name, _ in pieces} - set(new.get_vocab())
    assert left == {"aab"}  # ba is the least likely one, é is no piece of its own
    assert old.tokenize("aab éa") == ["aab", "éa"] and new.tokenize("aab éa") == ["a", "ab", "éa"]
    assert new.mask_token_id == len(new) - 1 == 9 and new.tokenize("a?b") == old.tokenize("a?b") == ["a", "?", "b"]


def test_letters_that_are_not_known_are_still_written_in_bytes():
    byte = [f"<0x{number:02X}>" for number in range(256)]
    names = [*ROBERTA, *byte, "a", "b", "ab", "aa"]
    likely = models.Unigram([(name, -1.0 - number) for number, name in enumerate(names)], unk_id=3, byte_fallback=True)
    for model in (
        likely,
        models.BPE(_numbered(names), [("a", "b"), ("a", "a")], unk_token="<unk>", byte_fallback=True),
    ):
        backend = Tokenizer(model)
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        old = dressed(backend, ROBERTA)
        new = made_of(old, ["ab"])
        assert new.tokenize("ab é") == old.tokenize("ab é") == ["ab", "<0xC3>", "<0xA9>"]
        assert "aa" in old.get_vocab() and ("aa" in new.get_vocab()) == (model is likely)  # there the least likely one


# What they make of texts


@MAKES
def test_texts_are_cut_as_before_and_no_word_is_lost(make):
    old = make()
    new = made_of(old, LINES)
    assert len(new) < len(old) and set(new.get_vocab()) < set(old.get_vocab())
    pairs = {"text": LINES, "text_pair": LINES[::-1], "return_token_type_ids": True}
    assert seen(new, LINES) == seen(old, LINES) and len(set(map(tuple, seen(new, LINES)))) == len(LINES)
    assert new(**pairs)["token_type_ids"] == old(**pairs)["token_type_ids"]
    marked = [f"the {old.mask_token} seems very warm"]
    assert seen(new, marked) == seen(old, marked) and old.mask_token in seen(new, marked)[0]
    assert seen(new, MORE) != seen(old, MORE)
    for one in (old, new):
        assert one.unk_token_id not in {number for ids in one(MORE)["input_ids"] for number in ids}
    assert [new.decode(ids, skip_special_tokens=True) for ids in new(MORE)["input_ids"]] == [
        old.decode(ids, skip_special_tokens=True) for ids in old(MORE)["input_ids"]
    ]


@MAKES
@pytest.mark.parametrize("seed", range(6))
def test_any_text_of_kept_pieces_is_cut_as_before(make, seed):
    """Also others than were read: of random words, those whose pieces all stay."""
    draw = random.Random(seed)
    sound = ["".join(draw.choices("abn", k=draw.randint(1, 9))) for _ in range(300)]
    old = make(lines=(" ".join(sound[:150]),))
    new = made_of(old, [" ".join(sound[:30])])
    known, cut = new.get_vocab().keys(), 0
    for word in sound:
        before, after = seen(old, [word])[0], seen(new, [word])[0]
        assert (before == after) == (set(before) <= known) and new.unk_token not in set(after) - set(before)
        cut += before != after
    assert 0 < cut < 300 and len(new) < len(old)


@MAKES
def test_a_saved_tokenizer_is_the_same(make, tmp_path):
    new = made_of(make(), LINES)
    new.save_pretrained(tmp_path)
    found = AutoTokenizer.from_pretrained(tmp_path)
    assert found.get_vocab() == new.get_vocab() and found.special_tokens_map == new.special_tokens_map
    texts = [*LINES, *MORE, f"a {new.mask_token} b", f"a{new.mask_token}b"]
    assert found(texts)["input_ids"] == new(texts)["input_ids"] and found.model_max_length == 64


def dress_of(family):
    """A tokenizer as transformers makes it for a family."""
    likely, pairs = (json.loads(make().backend_tokenizer.to_str())["model"] for make in (likely_pieces, byte_pairs))
    ordinary = [tuple(entry) for entry in likely["vocab"] if entry[0] not in ROBERTA]
    pieces = [name for name in word_pieces().get_vocab() if name not in BERT]

    def of(*names):
        return [(name, 0.0) for name in names]

    makes = {
        "roberta": lambda: transformers.RobertaTokenizer(pairs["vocab"], [tuple(pair) for pair in pairs["merges"]]),
        "xlm-roberta": lambda: transformers.XLMRobertaTokenizer([*of(*ROBERTA[:4]), *ordinary, *of("<mask>")]),
        "albert": lambda: transformers.AlbertTokenizer([*of("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"), *ordinary]),
        "deberta-v2": lambda: transformers.DebertaV2Tokenizer([*of("[PAD]", "[CLS]", "[SEP]", "[UNK]"), *ordinary]),
        "mpnet": lambda: transformers.MPNetTokenizer(_numbered([*ROBERTA[:3], "[UNK]", "<unk>", *pieces, "<mask>"])),
        "bert": lambda: transformers.BertTokenizer(_numbered([*BERT, *pieces]), extra_special_tokens=["<one>"]),
    }
    return makes[family]()


def _numbered(names):
    return {name: number for number, name in enumerate(names)}


@pytest.mark.parametrize("name", ["roberta", "xlm-roberta", "albert", "deberta-v2", "mpnet", "bert"])
def test_tokenizers_of_families(name, tmp_path):
    old = dress_of(name)
    new = made_of(old, LINES)
    new.save_pretrained(tmp_path)
    found = AutoTokenizer.from_pretrained(tmp_path)
    texts = [*LINES, f"the {old.mask_token} film", f"the{old.mask_token}film", "the <one> film"][
        : -1 if name != "bert" else None
    ]
    assert seen(old, texts) == seen(new, texts) == seen(found, texts) and len(found) == len(new) < len(old)
    assert old.special_tokens_map == new.special_tokens_map == found.special_tokens_map
    assert old.all_special_tokens == new.all_special_tokens and ("<one>" in new.all_special_tokens) == (name == "bert")
    assert not any(one.unk_token in row for one in (old, new) for row in seen(one, MORE))


# What the model makes of it


def fitted(family, make):
    """A tiny encoder that reads with a tokenizer; its table has rows that no piece has."""
    tokenizer = make()
    encoder = small(family, vocab_size=len(tokenizer) + 7, pad_token_id=tokenizer.pad_token_id)
    encoder.tokenizer = tokenizer
    return run("head", encoder, TASK, seed=3).encoder


@pytest.mark.parametrize(("make", "family"), pairs(CUTTERS, SHAPES, every=4))
def test_scores_are_the_same_to_the_last_bit(make, family, tmp_path):
    given = fitted(family, make)
    made = run("trim_vocabulary", given, TASK).encoder
    size = made.backbone.config.vocab_size
    assert size == len(made.tokenizer) == len(words(made.backbone).weight) < len(given.tokenizer)
    assert made.backbone.config.pad_token_id == made.tokenizer.pad_token_id == given.tokenizer.pad_token_id
    wanted = scores_of(given, TASK, split="train")
    assert torch.equal(scores_of(made, TASK, split="train"), wanted)
    theirs, ours = (words(one.backbone).weight for one in (given, made))
    old, new = given.tokenizer.get_vocab(), made.tokenizer.get_vocab()
    assert all(torch.equal(ours[number], theirs[old[piece]]) for piece, number in new.items())
    save_folder(made, tmp_path / "made")
    found = load_folder(tmp_path / "made")
    assert is_same_state(found, made) and torch.equal(scores_of(found, TASK, split="train"), wanted)
    assert found.history == made.history and found.backbone.config.vocab_size == size
    again = run("trim_vocabulary", found, TASK).encoder
    assert is_same_state(again, found) and again.tokenizer.get_vocab() == new


def test_hugging_face_reads_the_folder(tmp_path):
    made = run("trim_vocabulary", fitted("roberta", byte_pairs), TASK).encoder
    assert save_folder(made, tmp_path / "made") == "huggingface"
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "made").eval()
    rows = TASK.split("dev")
    inputs = transformers.AutoTokenizer.from_pretrained(tmp_path / "made")(
        rows.texts[:5], rows.pairs[:5], padding=True, return_tensors="pt"
    )
    inputs.pop("token_type_ids", None)
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).logits, scores_of(made, TASK), atol=1e-5, rtol=1e-4)


def test_padding_stays_where_positions_count_from_it():
    """Also with pieces before it that nothing needs."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    names = ["odd", "even", "<pad>", "<s>", "</s>", "<unk>", "<mask>", *letters, *(f"##{letter}" for letter in letters)]
    names += ["film", "was"]
    backend = Tokenizer(models.WordPiece(_numbered(names), unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    encoder = small("roberta", vocab_size=len(names), pad_token_id=2, bos_token_id=3, eos_token_id=60)
    encoder.tokenizer = dressed(backend, ROBERTA)
    made = run("trim_vocabulary(least=50)", run("head", encoder, TASK).encoder, TASK).encoder
    config = made.backbone.config
    assert config.pad_token_id == made.backbone.embeddings.padding_idx == made.tokenizer.pad_token_id == 2
    assert config.bos_token_id == 3 and "film" not in made.tokenizer.get_vocab()
    assert config.eos_token_id == made.tokenizer.get_vocab()["was"] == 59  # whatever a config names stays


def test_more_than_once_or_at_most_so_many(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("film film story film story plot music plot plot plot")
    given = small()
    kept = {}
    for settings in ("", "least=2, ", "least=4, ", "size=7, ", "size=8, least=4, "):
        made = run(f"trim_vocabulary({settings}text={str(text)!r})", given, None)
        kept[settings] = set(made.encoder.tokenizer.get_vocab()) - set(BERT)
        assert len(made.encoder.tokenizer) == len(kept[settings]) + 5
    assert kept[""] == {"film", "story", "plot", "music"} and kept["least=2, "] == {"film", "story", "plot"}
    assert kept["least=4, "] == {"plot"} == kept["size=8, least=4, "] and kept["size=7, "] == {"film", "plot"}
    assert made.notes == [f"trim_vocabulary kept 6 of 100 word pieces, which are 40 % of all tokens of {text}"]
    notes = run(f"trim_vocabulary + {SHORT}", given, TASK).notes
    known = {word for text in (*TASK.split("train").texts, *TASK.split("train").pairs) for word in text.split()}
    dev = [word for text in (*TASK.split("dev").texts, *TASK.split("dev").pairs) for word in text.split()]
    share = f"{100 * np.mean([word in known for word in dev]):.4g}"
    said = (
        f"kept {len(known) + 5} of 100 word pieces, which are 100 % of all tokens of train and {share} % of all tokens"
    )
    assert any(said in note for note in notes) and share != "100"


def test_words_that_come_one_by_one_and_spaces_count():
    tagging = toy_task("tag", 16)
    given = fitted("roberta", byte_pairs)
    made = run("head | trim_vocabulary", given, tagging).encoder
    old, new = (stream_of(one, tagging, "train").views[STUDENT].ids for one in (given, made))
    names = [one.tokenizer.convert_ids_to_tokens(ids.tolist()) for one, ids in ((given, old), (made, new))]
    assert names[0] == names[1] and len(made.tokenizer) < len(given.tokenizer)
    spaced = byte_pairs(lines=("a  b\n\n c",) * 9)
    assert seen(made_of(spaced, ["a  b\n\n c"]), ["a  b\n\n c"]) == seen(spaced, ["a  b\n\n c"])


def test_a_head_for_words_and_held_zeros_go_along(tmp_path):
    plain = run("pretrain(epochs=1, batch=4, length=16, keep_head=True)", fitted("bert", word_pieces), TASK).encoder
    made = run("trim_vocabulary", plain, TASK).encoder
    head, old = made.heads[WORDS], plain.heads[WORDS]
    before, after = plain.tokenizer.get_vocab(), made.tokenizer.get_vocab()
    assert head.words is words(made.backbone) and head.outputs == len(after)
    assert all(torch.equal(head.bias[number], old.bias[before[piece]]) for piece, number in after.items())
    assert torch.equal(head.dense.weight, old.dense.weight) and head.bias.abs().sum() > 0
    save_folder(made, tmp_path / "made")
    assert is_same_state(load_folder(tmp_path / "made"), made)
    waiting = fitted("bert", word_pieces)
    waiting.spare = {"dense.weight": torch.zeros(16, 16), "bias": torch.arange(len(waiting.tokenizer) + 7.0)}
    spare = run("trim_vocabulary", waiting, TASK).encoder.spare
    assert spare["bias"].tolist() == [float(before[piece]) for piece in sorted(after, key=after.get)]
    sparse = run(f"magnitude(0.5, what='layers+embeddings') + {SHORT}", fitted("bert", word_pieces), TASK).encoder
    later = run(f"trim_vocabulary | {SHORT}", sparse, TASK).encoder
    table, theirs = words(later.backbone).weight, words(sparse.backbone).weight
    rows = [sparse.tokenizer.get_vocab()[piece] for piece in sorted(after, key=after.get)]
    assert torch.equal(table == 0, theirs[rows] == 0) and not torch.equal(table, theirs[rows])


def test_with_other_methods(tmp_path):
    given = fitted("bert", word_pieces)
    tuned = "finetune(epochs=1, batch=8, lr=0.001)"
    for recipe in (
        f"{tuned} | trim_vocabulary | drop_layers(1) | distill + {SHORT}",  # a teacher with the whole vocabulary
        f"trim_vocabulary | {tuned} | align('hidden') + {SHORT}",
        f"{tuned} | prune(0.5) | trim_vocabulary | quantize(8)",
        f"{tuned} | lstm(6, inner=5) | distill + {SHORT} | trim_vocabulary",
        f"{tuned} | trim_vocabulary(size=70) | small_vocabulary(60)",
        f"small_vocabulary(90) | trim_vocabulary | {SHORT}",
        "trim_vocabulary | add_vocabulary(60) | pretrain(epochs=1, batch=4, length=16)",
    ):
        made = run(recipe, given, TASK, judge=False).encoder
        save_folder(made, tmp_path / "made")
        found = load_folder(tmp_path / "made")
        assert is_same_state(found, made) and torch.equal(scores_of(found, TASK), scores_of(made, TASK))
    # trained before or after, nothing but the rows that are gone differs
    lstm = f"{tuned} | lstm(6, inner=5) | {SHORT}"
    one, other = (
        run(lstm, given, TASK, judge=False).encoder,
        run(f"{lstm} | trim_vocabulary", given, TASK, judge=False).encoder,
    )
    assert torch.equal(scores_of(one, TASK, split="train"), scores_of(other, TASK, split="train"))


@pytest.mark.slow
def test_exported(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    made = run("trim_vocabulary", fitted("bert", word_pieces), TASK).encoder
    save_folder(made, tmp_path / "made")
    export_onnx(tmp_path / "made", tmp_path / "onnx")
    session = onnxruntime.InferenceSession(tmp_path / "onnx" / "model.onnx")
    tokenizer, rows = Tokenizer.from_file(str(tmp_path / "onnx" / "tokenizer.json")), TASK.split("train")
    found = tokenizer.encode(rows.texts[0], rows.pairs[0])
    wanted = {"input_ids": found.ids, "attention_mask": found.attention_mask, "token_type_ids": found.type_ids}
    inputs = {one.name: np.array([wanted[one.name]]) for one in session.get_inputs()}
    scores = torch.from_numpy(session.run(None, inputs)[0])
    torch.testing.assert_close(scores, scores_of(made, TASK, index=[0], split="train"), atol=1e-5, rtol=1e-4)


def test_resumed_is_equal_to_the_bit(tmp_path):
    recipe = "trim_vocabulary | train(epochs=3, batch=4, lr=0.001)"
    with killed_at(7):
        run(recipe, fitted("bert", word_pieces), TASK, work=tmp_path / "work", pause=0.0)
    with counted() as taken:
        again = run(
            f"{recipe} | quantize", fitted("bert", word_pieces), TASK, work=tmp_path / "work", pause=0.0
        ).encoder
        assert [step for step, _ in taken] == [7, 8, 9, 10, 11]
        later = run(
            f"{recipe} | quantize", fitted("bert", word_pieces), TASK, work=tmp_path / "work", pause=0.0
        ).encoder
        assert len(taken) == 5
    whole = run(f"{recipe} | quantize", fitted("bert", word_pieces), TASK).encoder
    assert is_same_state(again, whole) and is_same_state(later, whole) and again.history == whole.history
    assert later.tokenizer.get_vocab() == whole.tokenizer.get_vocab()


# What is known before, and what cannot be


def test_a_recipe_is_sized_up():
    found = estimate(small(), "trim_vocabulary(size=40) | quantize")
    assert found["fits"] and found["parameters"] == estimate(small(), "small_vocabulary(40) | quantize")["parameters"]
    unknown = estimate(small(), "trim_vocabulary")
    assert unknown["fits"] and unknown["parameters"] is None  # only texts can tell
    phase = phase_of(f"trim_vocabulary | drop_layers(1) | {SHORT}", fitted("bert", word_pieces), TASK)
    assert phase.stream.views[STUDENT].ids.max() < len(phase.encoder.tokenizer)


def test_refusals(tmp_path):
    text, empty = tmp_path / "text.txt", tmp_path / "empty.txt"
    text.write_text("the film"), empty.write_text("\n")
    both, blank, short = run("add_vocabulary(60)", small(), TASK).encoder, small(), small(vocab_size=90)
    blank.tokenizer = None
    for recipe, encoder, said in (
        ("trim_vocabulary(least=0)", small(), "least and size are whole numbers from 1"),
        ("trim_vocabulary(size=0)", small(), "least and size are whole numbers from 1"),
        ("trim_vocabulary(size=4)", small(), "5 pieces, .* write size=5 or more"),
        ("trim_vocabulary(text='nowhere.txt')", small(), "no file or folder"),
        (f"trim_vocabulary(text={str(empty)!r})", small(), "no text in"),
        ("quantize | trim_vocabulary", small(), "put quantize after it"),
        ("trim_vocabulary", both, "put trim_vocabulary before add_vocabulary"),
        (f"trim_vocabulary(text={str(text)!r})", blank, "has no tokenizer"),
        (f"{SHORT} | quantize | trim_vocabulary", small(), "put quantize after it"),
    ):
        check_refused(recipe, encoder, None if encoder is blank else TASK, said)
    with pytest.raises(UserError, match="give --task, or trim_vocabulary"):
        run("trim_vocabulary", small(), None)
    text.write_text("word30")  # which has number 97
    check_refused(f"trim_vocabulary(text={str(text)!r})", short, TASK, "only 90 word embeddings")


def test_a_tokenizer_of_an_unknown_make_is_refused():
    class Slow:
        is_fast = False

    encoder = small()
    encoder.tokenizer = Slow()
    with pytest.raises(UserError, match=r"a Slow, which has no tokenizer\.json"):
        METHODS["trim_vocabulary"]().plan(encoder, TASK)
    assert run_recipe("trim_vocabulary", small(), TASK, device="cpu").encoder.tokenizer.is_fast
