"""Zhao et al. 2019: a vocabulary of a few thousand word pieces, trained on the texts at hand, in place of many."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from smallbert.corpus import fingerprint_of_text
from smallbert.errors import UserError
from smallbert.methods import Method
from smallbert.model.anatomy import anatomy, replace_module, words
from smallbert.model.words import drop_word_head

SPECIAL = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
LETTERS = 1000  # no more different ones
MORE = "##"  # before a piece that goes on with a word


class SmallVocabulary(Method):
    """Train a small WordPiece vocabulary on a text file or on the task's texts and read with that from now on.

    A new piece begins as the mean of what the old vocabulary made of the same letters.
    """

    size: int = 4928
    text: str | None = None  # a file of plain text; the task's training texts if not given

    def check(self) -> None:
        """Room for more than the special pieces."""
        if self.size <= 2 * len(SPECIAL):
            raise UserError(
                f"small_vocabulary: size is a number of word pieces above {2 * len(SPECIAL)}, not {self.size}"
            )

    def reads(self) -> str:
        """The text."""
        if self.text is None or not Path(self.text).is_file():  # `plan` says what is wrong
            return ""
        return f" of {fingerprint_of_text(self.text, self.name)}"

    def plan(self, encoder: Any, task: Any) -> dict[str, Any]:
        """The pieces, and the new numbers of special ones; without texts or weights, only how many there may be."""
        if not isinstance(words(encoder.backbone), nn.Embedding):
            raise UserError("small_vocabulary needs plain word embeddings; put quantize behind it")
        if self.text is not None and not Path(self.text).is_file():
            raise UserError(f"small_vocabulary: there is no text file {self.text}")
        if (self.text is None and task is None) or encoder.device.type == "meta":
            return {"size": self.size, "pieces": [], "numbers": {}}
        if encoder.tokenizer is None:
            raise UserError("small_vocabulary: this model has no tokenizer to take the place of")
        special = _special(encoder.tokenizer)
        pieces = _train(lambda: _texts(self.text, task), self.size, special, _lowers(encoder.tokenizer))
        old = encoder.tokenizer.get_vocab()
        numbers = {str(old[name]): place for place, name in enumerate(special) if name in old}
        pad = getattr(encoder.backbone.config, "pad_token_id", None)
        if anatomy(encoder.backbone).offset and numbers.get(str(pad), pad) != pad:
            raise UserError("small_vocabulary: this model counts positions from its padding, which cannot be moved")
        return {"size": len(pieces), "pieces": pieces, "numbers": numbers}

    def build(self, encoder: Any, plan: dict[str, Any]) -> None:
        """A smaller table, and a config that knows the new numbers."""
        old: Any = words(encoder.backbone)
        config = encoder.backbone.config
        for name in ("pad", "bos", "eos", "cls", "sep", "mask", "unk"):
            number = getattr(config, f"{name}_token_id", None)
            if str(number) in plan["numbers"]:
                setattr(config, f"{name}_token_id", plan["numbers"][str(number)])
        config.vocab_size = plan["size"]
        pad = plan["numbers"].get(str(old.padding_idx), old.padding_idx)
        table = nn.Embedding(plan["size"], old.embedding_dim, padding_idx=pad if (pad or 0) < plan["size"] else None)
        replace_module(encoder.backbone, anatomy(encoder.backbone).words, table.to(encoder.device))
        drop_word_head(encoder)

    def fill(self, encoder: Any, before: Any, plan: dict[str, Any], task: Any, seed: int) -> None:
        """The new tokenizer, and for each of its pieces the mean of the old rows of the same letters."""
        if not plan["pieces"]:
            raise UserError("small_vocabulary learns from texts: give --task, or small_vocabulary(text='file.txt')")
        old, special = before.tokenizer, _special(before.tokenizer)
        encoder.tokenizer = _tokenizer(plan["pieces"], special, old)
        source: Any = words(before.backbone).weight
        table: Any = words(encoder.backbone).weight
        rows = source.detach()
        known = old.get_vocab()
        with torch.no_grad():
            for number, piece in enumerate(plan["pieces"]):
                found = [known[piece]] if piece in known else _old_pieces(old, piece)
                table[number] = rows[found].mean(0) if found else rows.mean(0)


def _special(tokenizer: Any) -> list[str]:
    """The special pieces in their new order: those with a small number keep it, the others fill the gaps."""
    names = {kind: getattr(tokenizer, f"{kind}_token", None) or name for kind, name in SPECIAL.items()}
    vocabulary, places = tokenizer.get_vocab(), dict.fromkeys(range(len(names)), "")
    late = []
    for name in names.values():
        number = vocabulary.get(name, len(names))
        if number < len(names) and not places[number]:
            places[number] = name
        else:
            late.append(name)
    return [places[place] or late.pop(0) for place in places]


def _texts(text: str | None, task: Any) -> Iterator[str]:
    if text is not None:
        with Path(text).open(encoding="utf-8", errors="replace") as file:
            yield from file
        return
    split = task.split("train")
    for one in (*split.texts, *(split.pairs or ())):
        yield one if isinstance(one, str) else " ".join(one)


def _lowers(tokenizer: Any) -> bool:
    normalizer = tokenizer.backend_tokenizer.normalizer
    return normalizer is not None and normalizer.normalize_str("A").endswith("a")


def _empty(lower: bool, unknown: str, vocabulary: dict[str, int] | None = None) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    made = Tokenizer(models.WordPiece(vocabulary or {}, unk_token=unknown, max_input_chars_per_word=100))
    made.normalizer = normalizers.BertNormalizer(lowercase=lower)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(prefix=MORE)
    return made


def _train(texts: Callable[[], Iterator[str]], size: int, special: list[str], lower: bool) -> list[str]:
    """The pieces by their numbers, the same for the same texts.

    The library numbers letters within words as it happens to meet them, and ties between merges follow numbers; so
    those letters are numbered here, among the special pieces.
    """
    from tokenizers import trainers

    made, seen = _empty(lower, special[0]), Counter[str]()
    for text in texts():
        seen.update(made.normalizer.normalize_str(text))
    most = min(LETTERS, (size - len(special)) // 2)
    letters = sorted(sorted(c for c in seen if not c.isspace()), key=seen.__getitem__, reverse=True)[:most]
    goes_on = [
        c for c in letters if len(made.pre_tokenizer.pre_tokenize_str(made.normalizer.normalize_str(c + c))) == 1
    ]
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        special_tokens=[*special, *(MORE + letter for letter in sorted(goes_on))],
        initial_alphabet=letters,
        limit_alphabet=len(letters),
        continuing_subword_prefix=MORE,
        show_progress=False,
    )
    made.train_from_iterator(texts(), trainer)
    found = made.get_vocab()
    return sorted(found, key=lambda piece: found[piece])


def _tokenizer(pieces: list[str], special: list[str], old: Any) -> Any:
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    names = {f"{kind}_token": getattr(old, f"{kind}_token", None) or name for kind, name in SPECIAL.items()}
    made = _empty(_lowers(old), names["unk_token"], {piece: number for number, piece in enumerate(pieces)})
    begin, end = names["cls_token"], names["sep_token"]
    made.post_processor = processors.TemplateProcessing(
        single=f"{begin}:0 $A:0 {end}:0",
        pair=f"{begin}:0 $A:0 {end}:0 $B:1 {end}:1",
        special_tokens=[(begin, pieces.index(begin)), (end, pieces.index(end))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        model_max_length=old.model_max_length,
        model_input_names=list(old.model_input_names),
        **names,
    )


def _old_pieces(old: Any, piece: str) -> list[int]:
    """What the old tokenizer makes of the letters of a piece, where it knows them."""
    found = old(piece.removeprefix(MORE), add_special_tokens=False)["input_ids"]
    return [number for number in found if number != old.unk_token_id]
