"""Windows hold every token of a context, mark the right answer tokens, and decode back to the answer's own text."""

import time
from typing import Any

import numpy as np
import pytest

from smallbert.errors import UserError
from smallbert.tasks import Split
from smallbert.tasks.answers import Windows, best_answers, windows

WORDS = "when was the mill built who did it burn ? . , in 18 ##20 by anna berg down 19 ##01 and never re".split()
CONTEXT = "The mill was built in 1820 by Anna Berg. It burned down in 1901, and was never rebuilt."


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A WordPiece tokenizer of two dozen words, the shape of BERT's."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {
        word: place for place, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS, "##ed", "##built"])
    }
    bert = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    bert.normalizer = normalizers.BertNormalizer(lowercase=True)
    bert.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    bert.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bert, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"
    )


def asked(*answers: str, question: str = "When was it built?", context: str = CONTEXT) -> Split:
    labels = [
        {"text": [text] if text else [], "answer_start": [context.index(text)] if text else []} for text in answers
    ]
    return Split([question] * len(answers), [context] * len(answers), labels, [str(row) for row in range(len(answers))])


def pointed(found: Windows, sure: float = 5.0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Logits of a perfect model: high at the marked tokens, which is the first token where there is no answer."""
    return tuple(  # type: ignore[return-value]
        [np.where(np.arange(len(ids)) == place, sure, 0.0) for ids, place in zip(found.input_ids, places, strict=True)]
        for places in (found.start, found.end)
    )


def test_one_window_marks_the_answer(tokenizer: Any) -> None:
    split = asked("1820", "Anna Berg", "")
    found = windows(tokenizer, split, 64)
    assert len(found) == 3 and list(found.example) == [0, 1, 2]
    tokens = tokenizer.convert_ids_to_tokens(found.input_ids[0][found.start[0] : found.end[0] + 1])
    assert tokens == ["18", "##20"] and (found.start[2], found.end[2]) == (0, 0)
    assert tokenizer.convert_ids_to_tokens(found.input_ids[0])[0] == "[CLS]"
    text = found.token_type_ids[0].astype(bool)
    text[-1] = False  # the last [SEP] belongs to the second text and is not context
    assert (found.context[0] == text).all()
    assert best_answers(*pointed(found), found, split, unanswerable=True) == ["1820", "Anna Berg", ""]


def test_many_windows_overlap_and_lose_nothing(tokenizer: Any) -> None:
    split = asked("1901", "1820")
    whole, cut = windows(tokenizer, split, 64), windows(tokenizer, split, 18, stride=3)
    assert len(cut) > len(whole) and max(map(len, cut.input_ids)) <= 18
    for row in range(2):
        seen = [tuple(pair) for at in np.flatnonzero(cut.example == row) for pair in cut.offsets[at][cut.context[at]]]
        assert set(seen) == {tuple(pair) for pair in whole.offsets[row][whole.context[row]]} and len(seen) > len(
            set(seen)
        )
        assert (cut.start[cut.example == row] == 0).any(), "some window does not hold the answer"
    assert best_answers(*pointed(cut), cut, split, unanswerable=False) == ["1901", "1820"]


def test_without_answers_nothing_is_marked(tokenizer: Any) -> None:
    found = windows(tokenizer, asked("1901"), 64, with_answers=False)
    assert found.start.tolist() == found.end.tolist() == [0]


def test_long_question_and_short_window_leave_room(tokenizer: Any) -> None:
    split = asked("1901", question="   " + "when was it built " * 50)
    found = windows(tokenizer, split, 20)
    assert max(map(len, found.input_ids)) <= 20 and all(part.any() for part in found.context)
    assert best_answers(*pointed(found), found, split, unanswerable=False) == ["1901"]
    with pytest.raises(UserError, match="too short"):
        windows(tokenizer, split, 8)
    with pytest.raises(UserError, match="needs a fast tokenizer"):
        windows(object(), split, 64)


def test_answer_inside_a_word_takes_the_whole_token(tokenizer: Any) -> None:
    split = asked("burn", "uilt in 18", "20")
    found = windows(tokenizer, split, 64)
    assert best_answers(*pointed(found), found, split, unanswerable=False) == ["burn", "built in 18", "20"]


def test_order_length_and_question_tokens_are_respected(tokenizer: Any) -> None:
    split = asked("1820")
    found = windows(tokenizer, split, 64)
    tokens = np.flatnonzero(found.context[0])
    starts, ends = np.zeros((2, len(found.input_ids[0])))
    starts[1] = ends[2] = 99  # the question's own words are never an answer
    starts[tokens[9]], ends[tokens[2]], ends[tokens[9]] = 9, 5, 1  # an end before its start is no answer
    assert best_answers([starts], [ends], found, split, False) == ["Berg"]
    starts, ends = np.zeros((2, len(found.input_ids[0])))
    starts[tokens[0]], starts[tokens[4]], ends[tokens[6]] = 9, 7, 8
    assert best_answers([starts], [ends], found, split, False) == ["The mill was built in 1820"]
    assert best_answers([starts], [ends], found, split, False, max_answer=3) == ["in 1820"]


def test_no_answer_wins_only_if_every_window_agrees(tokenizer: Any) -> None:
    split = asked("1901")
    found = windows(tokenizer, split, 18, stride=3)
    starts, ends = pointed(found)
    for logits, place in zip(starts, found.start, strict=True):
        logits[0] = 1.0 if place else 50.0  # the window with the answer does not believe in none
    assert best_answers(starts, ends, found, split, unanswerable=True) == ["1901"]
    for logits in starts:
        logits[0] = 50.0
    assert best_answers(starts, ends, found, split, unanswerable=True) == [""]
    assert best_answers(starts, ends, found, split, unanswerable=False) == ["1901"]


def test_broken_logits_and_empty_context_do_not_crash(tokenizer: Any) -> None:
    split = asked("", context="")
    found = windows(tokenizer, split, 64)
    logits = [np.full(len(ids), np.nan) for ids in found.input_ids]
    assert best_answers(logits, logits, found, split, unanswerable=False) == [""]
    split = asked("1820")
    found = windows(tokenizer, split, 64)
    logits = [np.full(len(ids), np.nan) for ids in found.input_ids]
    assert best_answers(logits, logits, found, split, unanswerable=False) == [""]


def test_two_thousand_windows_decode_quickly(tokenizer: Any) -> None:
    split = asked(*["1820"] * 2000)
    found = windows(tokenizer, split, 64)
    logits = [np.random.default_rng(at).normal(size=len(ids)) for at, ids in enumerate(found.input_ids)]
    begin = time.process_time()
    answers = best_answers(logits, logits, found, split, unanswerable=False)
    assert len(answers) == 2000 and time.process_time() - begin < 5, (
        "about 0.1 s of one core; waiting for others does not count"
    )
