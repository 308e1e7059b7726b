"""Questions on a text: long contexts cut into overlapping windows, and the best answer found over all of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from smallbert.errors import UserError
from smallbert.tasks.task import Split

LONGEST_QUESTION = 64  # tokens; a longer question is cut, so that the context always has room
SHORTEST_WINDOW = 16
LONGEST_ANSWER = 30  # tokens
CHUNK = 512  # examples tokenised at once: offsets as Python tuples would fill the memory otherwise


@dataclass(frozen=True)
class Windows:
    """One entry per window: "[CLS] question [SEP] part of the context [SEP]".

    start, end   first and last token of the answer, (0, 0) where the answer is not in this window
    example      which row of the split the window belongs to
    offsets      (tokens, 2): where each token begins and ends in its text
    context      (tokens,): True for the tokens of the context
    """

    input_ids: list[np.ndarray]
    token_type_ids: list[np.ndarray]
    start: np.ndarray
    end: np.ndarray
    example: np.ndarray
    offsets: list[np.ndarray]
    context: list[np.ndarray]

    def __len__(self) -> int:
        """How many windows."""
        return len(self.input_ids)


def windows(
    tokenizer: Any,
    split: Split,
    length: int,
    stride: int = 128,
    with_answers: bool = True,
    say: Callable[[int, int], None] = lambda done, total: None,
) -> Windows:
    """Cut every context into windows of at most `length` tokens that share `stride` tokens with the one before."""
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(f"{type(tokenizer).__name__} gives no offsets; answering questions needs a fast tokenizer")
    room = length - tokenizer.num_special_tokens_to_add(pair=True)
    if length < SHORTEST_WINDOW:
        raise UserError(
            f"a window of {length} tokens is too short to answer questions; give at least {SHORTEST_WINDOW}"
        )
    longest = min(LONGEST_QUESTION, room // 2)
    stride = min(stride, (room - longest) // 2)
    found = Windows([], [], np.zeros(0), np.zeros(0), np.zeros(0), [], [])
    example: list[int] = []
    for begin in range(0, len(split), CHUNK):
        rows = slice(begin, begin + CHUNK)
        batch = tokenizer(
            _cut_questions(tokenizer, split.texts[rows], longest),
            (split.pairs or [])[rows],
            truncation="only_second",
            max_length=length,
            stride=stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            return_token_type_ids=True,
        )
        example += [begin + row for row in batch["overflow_to_sample_mapping"]]
        found.input_ids.extend(np.array(ids, dtype=np.int32) for ids in batch["input_ids"])
        found.token_type_ids.extend(np.array(ids, dtype=np.int32) for ids in batch["token_type_ids"])
        found.offsets.extend(np.array(pairs, dtype=np.int32) for pairs in batch["offset_mapping"])
        found.context.extend(
            np.array([part == 1 for part in batch.sequence_ids(row)]) for row in range(len(batch["input_ids"]))
        )
        say(min(begin + CHUNK, len(split)), len(split))
    spans = np.zeros((len(found), 2), dtype=np.int64)
    if with_answers:
        for window, row in enumerate(example):
            spans[window] = _answer_tokens(found.offsets[window], found.context[window], split.labels[row])
    return Windows(
        found.input_ids,
        found.token_type_ids,
        spans[:, 0],
        spans[:, 1],
        np.array(example, dtype=np.int64),
        found.offsets,
        found.context,
    )


def best_answers(
    start_logits: Sequence[np.ndarray],
    end_logits: Sequence[np.ndarray],
    windows: Windows,
    split: Split,
    unanswerable: bool,
    n_best: int = 20,
    max_answer: int = LONGEST_ANSWER,
) -> list[str]:
    """The answer of the highest start + end score over all windows of each question, as text of its context.

    Only spans between the `n_best` strongest starts and ends of a window compete, none longer than `max_answer` tokens.
    Where questions may be unanswerable, it is "" if the first token (at its lowest over the windows) scores higher.
    """
    best = np.full(len(split), -np.inf)
    nothing = np.full(len(split), np.inf)
    answers = [""] * len(split)
    for window, row in enumerate(windows.example):
        tokens = np.flatnonzero(windows.context[window])
        starts = np.asarray(start_logits[window], dtype=np.float64)
        ends = np.asarray(end_logits[window], dtype=np.float64)
        nothing[row] = min(nothing[row], starts[0] + ends[0])
        # Strong starts and strong ends in one list: a one-token answer is then always among the spans.
        tokens = tokens[np.union1d(_strongest(starts[tokens], n_best), _strongest(ends[tokens], n_best))]
        width = tokens[None, :] - tokens[:, None]
        scores = np.where((width >= 0) & (width < max_answer), starts[tokens, None] + ends[None, tokens], -np.inf)
        if scores.size and scores.max() > best[row]:
            first, last = np.unravel_index(scores.argmax(), scores.shape)
            best[row] = scores[first, last]
            offsets = windows.offsets[window]
            answers[row] = (split.pairs or [])[row][offsets[tokens[first], 0] : offsets[tokens[last], 1]].strip()
    return ["" if unanswerable and nothing[row] > best[row] else answer for row, answer in enumerate(answers)]


def _strongest(scores: np.ndarray, count: int) -> np.ndarray:
    return np.argpartition(-scores, count)[:count] if count < len(scores) else np.arange(len(scores))


def _cut_questions(tokenizer: Any, questions: list[str], longest: int) -> list[str]:
    """Questions without leading spaces (some of SQuAD's have thousands) and without their tokens after `longest`."""
    questions = [question.lstrip() for question in questions]
    offsets = tokenizer(questions, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return [
        question if len(tokens) <= longest else question[: tokens[longest - 1][1]]
        for question, tokens in zip(questions, offsets, strict=True)
    ]


def _answer_tokens(offsets: np.ndarray, context: np.ndarray, answers: dict[str, list[Any]]) -> tuple[int, int]:
    tokens = np.flatnonzero(context)
    if not answers["text"] or not len(tokens):
        return 0, 0
    begin = answers["answer_start"][0]
    end = begin + len(answers["text"][0])
    begins, ends = offsets[tokens, 0], offsets[tokens, 1]
    if begin < begins[0] or end > ends[-1]:
        return 0, 0
    # The first token that ends after the answer begins, the last one that begins before it ends.
    first, last = np.searchsorted(ends, begin, side="right"), np.searchsorted(begins, end, side="left") - 1
    return (int(tokens[first]), int(tokens[last])) if first <= last else (0, 0)
