"""A bidirectional LSTM over word embeddings, with no layers in the sense of a transformer: the smallest of students.

It is a Hugging Face model class of our own, so that configs, skeletons and files need nothing special.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init

from smallbert.model.batch import Batch


class BilstmConfig(PreTrainedConfig):
    """Sizes, and what is read: single texts, pairs of texts one by one, or every token."""

    model_type = "bilstm"

    vocab_size: int = 30522
    embedding_size: int = 300
    lstm_size: int = 150
    lstm_layers: int = 1
    hidden_size: int = 200  # what the head reads
    num_hidden_layers: int = 0  # nothing here can be dropped or mixed
    reads: str = "text"
    classifier_dropout: float = 0.1
    initializer_range: float = 0.1
    pad_token_id: int | None = 0
    sep_token_id: int | None = None


def _run(
    values: Tensor, read: Tensor, recall: Tensor, read_bias: Tensor, recall_bias: Tensor, training: bool = False
) -> Tensor:
    empty, weights = values.new_zeros(1, len(values), recall.shape[1]), [read, recall, read_bias, recall_bias]
    # has biases, one layer, no dropout, in training or not, one direction, texts first
    return torch.lstm(values, (empty, empty), weights, True, 1, 0.0, training, False, True)[0]


@torch.library.custom_op("smallbert::lstm", mutates_args=())
def whole_lstm(values: Tensor, read: Tensor, recall: Tensor, read_bias: Tensor, recall_bias: Tensor) -> Tensor:
    """The same as one operator, which an exporter takes as it is: torch would write one step for every token."""
    return _run(values, read, recall, read_bias, recall_bias)


@whole_lstm.register_fake
def _(values: Tensor, read: Tensor, recall: Tensor, read_bias: Tensor, recall_bias: Tensor) -> Tensor:
    return values.new_empty(values.shape[0], values.shape[1], recall.shape[1])


class Lstm(nn.Module):
    """One direction of one layer, its weights looked up at every call, since training may show others."""

    takes_weights = True  # it multiplies by its matrices itself, so that they stay plain ones

    def __init__(self, inputs: int, size: int):
        """Four gates below each other: in, forget, cell, out."""
        super().__init__()
        self.size = size
        self.read = nn.Linear(inputs, 4 * size)
        self.recall = nn.Linear(size, 4 * size)

    def forward(self, values: Tensor) -> Tensor:
        """(texts, tokens, inputs) -> (texts, tokens, size), from the first token to the last."""
        weights = (self.read.weight, self.recall.weight, self.read.bias, self.recall.bias)
        if torch.compiler.is_exporting():
            return whole_lstm(values, *weights)
        return _run(values, *weights, self.training)


class Words(nn.Module):
    """The word embeddings."""

    def __init__(self, config: BilstmConfig):
        """An empty table."""
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.embedding_size, padding_idx=config.pad_token_id)
        self.dropout = nn.Dropout(config.classifier_dropout)

    def forward(self, ids: Tensor) -> Tensor:
        """Look up."""
        return self.dropout(self.word_embeddings(ids))


class Bilstm(PreTrainedModel):
    """Padded batches in; at every token what the head reads: of that token, or the same of the whole text.

    text: h = [last forward state; last backward state]    pair: [h1; h2; |h1 - h2|; h1 * h2]    token: its two states
    """

    config_class = BilstmConfig
    base_model_prefix = "bilstm"

    def __init__(self, config: BilstmConfig):
        """Two directions a layer, then one dense layer."""
        super().__init__(config)
        size = config.lstm_size
        inputs = [config.embedding_size, *[2 * size] * (config.lstm_layers - 1)]
        self.embeddings = Words(config)
        self.forwards = nn.ModuleList(Lstm(width, size) for width in inputs)
        self.backwards = nn.ModuleList(Lstm(width, size) for width in inputs)
        self.dense = nn.Linear(2 * size * (4 if config.reads == "pair" else 1), config.hidden_size)
        self.layers = nn.ModuleList()
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=self.config.initializer_range)
        elif isinstance(module, nn.Linear):
            bound = module.in_features**-0.5
            init.uniform_(module.weight, -bound, bound)
            init.zeros_(module.bias)

    def forward(self, batch: Batch) -> Tensor:
        """Hidden states (texts, tokens, hidden_size)."""
        values, tokens = self.embeddings(batch.input_ids), batch.input_ids.shape[1]
        mask = torch.ones_like(batch.input_ids) if batch.attention_mask is None else batch.attention_mask
        lengths = mask.sum(1)
        if self.config.reads == "pair":
            first = self._first_text(batch.input_ids, mask)
            place = torch.arange(tokens, device=lengths.device) + first[:, None]
            second = _pick(values, place.clamp(max=tokens - 1))
            values, lengths = torch.cat([values, second]), torch.cat([first, lengths - first])
        states = self._run(values, lengths)
        if self.config.reads == "token":
            return functional.relu(self.dense(states))
        ahead, back = states.chunk(2, -1)
        last = (lengths - 1).clamp(min=0)[:, None]
        text = torch.cat([_pick(ahead, last)[:, 0], back[:, 0]], -1)
        if self.config.reads == "pair":
            one, other = text[: batch.input_ids.shape[0]], text[batch.input_ids.shape[0] :]
            text = torch.cat([one, other, (one - other).abs(), one * other], -1)
        return functional.relu(self.dense(text)).unsqueeze(1).expand(-1, tokens, -1)

    def _first_text(self, ids: Tensor, mask: Tensor) -> Tensor:
        """How many tokens belong to the first text of each pair: those up to the first separator."""
        ends = (ids == self.config.sep_token_id) & (mask > 0)
        return ((ends.cumsum(1) - ends.long() == 0) & (mask > 0)).sum(1)

    def _run(self, values: Tensor, lengths: Tensor) -> Tensor:
        """Both directions, each text from its own first or last token on, whatever padding lies behind."""
        place = torch.arange(values.shape[1], device=lengths.device)
        there = (place < lengths[:, None]).unsqueeze(-1)
        turned = (lengths[:, None] - 1 - place).clamp(min=0)
        for ahead, back in zip(self.forwards, self.backwards, strict=True):
            values = values * there
            both = [ahead(values), _pick(back(_pick(values, turned)), turned)]
            values = torch.cat(both, -1) * there
        return values


def _pick(values: Tensor, places: Tensor) -> Tensor:
    """The values at some places of each text."""
    return values.gather(1, places.unsqueeze(-1).expand(-1, -1, values.shape[-1]))


def register() -> None:
    """Let transformers make one from a config."""
    known: Any = {"exist_ok": True}
    AutoConfig.register("bilstm", BilstmConfig, **known)
    AutoModel.register(BilstmConfig, Bilstm, **known)


register()
