"""A one-layer bidirectional LSTM as the student: a hundred times smaller, and it knows only what it is taught.

Tang et al. 2019. Pairs of texts are read one by one. Word embeddings start as the teacher's; train(freeze='embeddings')
does not train them.
"""

from typing import Any, Literal

import torch

from smallbert.errors import UserError
from smallbert.methods import Method
from smallbert.model.anatomy import words
from smallbert.model.encoder import HEAD, plain_config
from smallbert.model.replace import bare, check_bare, check_words, draw_backbone, reduced_words, replace_backbone

READS = {"tag": "token", "answer": "token"}


class Lstm(Method):
    """Make a student of a bidirectional LSTM over the teacher's word embeddings, or new ones.

    width: dimensions of the state of each direction
    layers: number of LSTM layers
    inner: dimensions that the head reads, from a dense layer above the LSTM
    words: word embeddings: 'copy', the teacher's, reduced to their main directions for a smaller `embed`; 'new', random
    embed: dimensions of a word's embedding, at most the teacher's if copied; None: the teacher's, or 300 for new words
    pairs: whether two texts are read one by one and then compared, or as one; None: one by one if the task has two.
        Tagging and question answering always read both as one.
    dropout: rate at which word embeddings, and what the head reads, are dropped while training
    """

    width: int = 150
    layers: int = 1
    inner: int = 200
    words: Literal["copy", "new"] = "copy"
    embed: int | None = None
    pairs: bool | None = None
    dropout: float = 0.1

    def check(self) -> None:
        """Sizes and a share."""
        if min(self.width, self.layers, self.inner, self.embed or 1) < 1 or not 0 <= self.dropout < 1:
            raise UserError(f"lstm: sizes must be whole numbers from 1 and dropout a share below 1, unlike {self}")

    def plan(self, encoder: Any, task: Any) -> dict[str, Any]:
        """The config of the new model; the task says whether it reads tokens, texts or pairs."""
        from smallbert.model.bilstm import BilstmConfig

        check_bare(encoder, self.name)
        kind = encoder.head.kind if HEAD in encoder.heads else getattr(task, "kind", "classify")
        pairs = task is not None and task.split("train").pairs is not None if self.pairs is None else self.pairs
        old, end = encoder.backbone.config, getattr(encoder.tokenizer, "sep_token_id", None)
        table: Any = words(encoder.backbone)
        if self.words == "copy":
            check_words(encoder, self.embed or table.embedding_dim, self.name)
        reads = READS.get(kind, "pair" if pairs else "text")
        if reads == "pair" and end is None and encoder.device.type != "meta":  # an estimate may not know the tokenizer
            raise UserError(
                "lstm: this tokenizer puts nothing between two texts; write pairs=False to read them as one"
            )
        config = BilstmConfig(
            vocab_size=old.vocab_size,
            embedding_size=self.embed or (300 if self.words == "new" else table.embedding_dim),
            lstm_size=self.width,
            lstm_layers=self.layers,
            hidden_size=self.inner,
            reads=reads,
            classifier_dropout=self.dropout,
            pad_token_id=getattr(old, "pad_token_id", 0),
            sep_token_id=end,
        )
        return {"config": plain_config(config), "from_pooler": False}

    def build(self, encoder: Any, plan: dict[str, Any]) -> None:
        """An empty one, and a head on it."""
        replace_backbone(encoder, bare(plan["config"], pooler=False))

    def fill(self, encoder: Any, before: Any, plan: dict[str, Any], task: Any, seed: int) -> None:
        """Drawn, all but the words."""
        draw_backbone(encoder, seed)
        if self.words == "copy":
            table = encoder.backbone.embeddings.word_embeddings.weight
            with torch.no_grad():
                table.copy_(reduced_words(before, table.shape[1]))
