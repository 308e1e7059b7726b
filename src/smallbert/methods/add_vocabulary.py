"""Zhao et al. 2019: a second, small vocabulary beside the model's own, so that one model learns to read both."""

from typing import Any

import torch

from smallbert.errors import UserError
from smallbert.methods.small_vocabulary import SmallVocabulary, need_pieces, put_table
from smallbert.model.anatomy import words
from smallbert.model.vocabulary import SPECIAL, mean_rows, old_rows
from smallbert.model.words import WORDS, WordHead, fill_rows


class AddVocabulary(SmallVocabulary):
    """Add word embeddings for a second, small WordPiece vocabulary, learned beside the first by pretrain.

    add_vocabulary(4928) | pretrain('text.txt', mixed=0.5)      half of the words are split by the small vocabulary
    … | small_vocabulary                                        which is then the only one
    Texts of tasks are read with the first vocabulary until then. A new piece starts as in small_vocabulary.
    """

    def plan(self, encoder: Any, task: Any) -> dict[str, Any]:
        """The pieces; without texts to look at, only how many there may be."""
        if encoder.second:
            raise UserError(
                "add_vocabulary: this model has a second vocabulary already; small_vocabulary makes it the only one"
            )
        pieces = self.learn(encoder, task)
        return {"size": len(pieces) or self.size, "pieces": pieces}

    def build(self, encoder: Any, plan: dict[str, Any]) -> None:
        """A longer table, and a head for words as long."""
        old: Any = words(encoder.backbone)
        put_table(encoder, len(old.weight) + plan["size"] - len(SPECIAL), old.padding_idx)
        encoder.second = list(plan["pieces"]) or [""] * plan["size"]  # which an estimate does not know
        if WORDS in encoder.heads:
            encoder.heads[WORDS] = WordHead(encoder.backbone).to(encoder.device)

    def attach(self, phase: Any) -> None:
        """Nothing to say: tasks are read as before."""

    def fill(self, encoder: Any, before: Any, plan: dict[str, Any], task: Any, seed: int) -> None:
        """The old rows, and behind them the means; so do the biases of words."""
        need_pieces(plan, self.name)
        rows = old_rows(before.tokenizer, plan["pieces"][len(SPECIAL) :])

        def longer(values: Any) -> Any:
            return torch.cat([values, mean_rows(values, rows)])

        fill_rows(encoder, before, longer)
