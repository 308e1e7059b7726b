"""The masked-LM head, which guesses words: its last matrix is the word embedding itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional

from smallbert.errors import UserError
from smallbert.model.anatomy import words
from smallbert.model.batch import Batch
from smallbert.model.cpu import faster

WORDS = "words"
# Where model files keep it: its dense layer, its norm, and a bias for each word.
_BERT = [("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.bias")]
_ROBERTA = [("lm_head.dense", "lm_head.layer_norm", "lm_head.bias")]
PLACES: dict[str, list[tuple[str, str, str]]] = {
    "bert": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "mpnet": _ROBERTA,
    "electra": [("generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head.bias")],
    "distilbert": [("vocab_transform", "vocab_layer_norm", "vocab_projector.bias")],
    "albert": [("predictions.dense", "predictions.LayerNorm", "predictions.bias")],
    "modernbert": [("head.dense", "head.norm", "decoder.bias")],
    "deberta-v2": [
        *_BERT,
        ("lm_predictions.lm_head.dense", "lm_predictions.lm_head.LayerNorm", "lm_predictions.lm_head.bias"),
    ],
}
ACTIVATIONS = {"modernbert": "classifier_activation", "distilbert": "activation"}  # a config's name for it


class WordHead(nn.Module):
    """Scores of every word of the vocabulary, at the places that a batch names: (places, words)."""

    kind = WORDS
    labels: tuple[str, ...] = ()
    reads_first = False

    def __init__(self, backbone: Any):
        """Make a head that changes nothing yet, tied to the backbone's word embedding."""
        from transformers.activations import ACT2FN

        super().__init__()
        config: Any = backbone.config
        table: Any = words(backbone)
        self.words = table
        width = table.embedding_dim
        eps = next((getattr(config, name) for name in ("layer_norm_eps", "norm_eps") if hasattr(config, name)), 1e-12)
        self.dense = nn.Linear(config.hidden_size, width)
        self.activation = ACT2FN[getattr(config, ACTIVATIONS.get(config.model_type, "hidden_act"), "gelu")]
        self.norm = nn.LayerNorm(width, eps=eps)
        self.bias = nn.Parameter(torch.zeros(table.num_embeddings))
        self.passing = False  # whether it goes when its phase ends

    @property
    def outputs(self) -> int:
        """How many words there are."""
        return len(self.bias)

    def forward(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Read the hidden states of a batch."""
        return self.score(self.pick(hidden, batch), batch)

    def pick(self, hidden: Tensor, batch: Batch) -> Tensor:
        """All it needs of a layer's output: the tokens to be guessed."""
        assert batch.places is not None
        return hidden.flatten(0, 1).index_select(0, batch.places)

    def score(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Scores from what was picked."""
        with faster(hidden):
            return functional.linear(self.norm(self.activation(self.dense(hidden))), self._matrix(), self.bias)

    def _matrix(self) -> Tensor:
        """A row a word; a table stored in few bits is looked up whole."""
        if isinstance(self.words, nn.Embedding):
            return self.words.weight
        found: Tensor = self.words(torch.arange(self.outputs, device=self.bias.device))
        return found


def find_word_head(folder: Path, family: str) -> dict[str, Tensor]:
    """The masked-LM head of a Hugging Face folder, under our names; empty where its file has none."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            known = set(tensors.keys())
            for places in PLACES.get(family, []):
                for ours, theirs in _names(places).items():
                    if name := next((one for one in theirs if one in known), None):
                        found[ours] = tensors.get_tensor(name).float()
    return found if {"dense.weight", "norm.weight"} <= found.keys() else {}


def put_word_head(encoder: Any, seed: int = 0) -> str:
    """Give an encoder a masked-LM head, with the weights of its model file where they fit; says where it is from.

    "its model file"    "new"
    """
    head = WordHead(encoder.backbone)
    fits = {n: t for n, t in encoder.spare.items() if head.get_parameter(n).shape == t.shape}
    with torch.no_grad():
        if {"dense.weight", "norm.weight"} <= fits.keys():
            for name, parameter in head.named_parameters():
                if not name.startswith("words."):
                    parameter.copy_(fits[name]) if name in fits else parameter.fill_(0.0)
        else:
            fits, std = {}, getattr(encoder.backbone.config, "initializer_range", 0.02)
            nn.init.normal_(head.dense.weight, 0.0, std, generator=torch.Generator().manual_seed(seed))
            nn.init.zeros_(head.dense.bias)
    encoder.heads[WORDS] = head.to(encoder.device).train(encoder.training)
    return "its model file" if fits else "new"


def word_head_of(encoder: Any) -> dict[str, Tensor]:
    """What an encoder has to guess words by, beside its word embeddings: of its head, or of its model file."""
    if WORDS not in encoder.heads:
        return dict(encoder.spare)
    own = encoder.heads[WORDS].named_parameters()
    return {name: one.detach().clone() for name, one in own if not name.startswith("words.")}


def drop_word_head(encoder: Any) -> None:
    """Forget what guesses words, in a head or in waiting: another backbone or vocabulary has no use for it."""
    encoder.spare = {}
    if WORDS in encoder.heads:
        del encoder.heads[WORDS]


def fill_rows(encoder: Any, before: Any, rows: Callable[[Tensor], Tensor]) -> None:
    """Word embeddings and what guesses words, from an encoder with other rows; `rows` makes ours of theirs."""
    with torch.no_grad():
        words(encoder.backbone).weight.copy_(rows(words(before.backbone).weight))  # type: ignore[operator, arg-type]
        for name, parameter in encoder.heads[WORDS].named_parameters() if WORDS in encoder.heads else ():
            theirs = before.heads[WORDS].get_parameter(name)
            parameter.copy_(theirs if theirs.shape == parameter.shape else rows(theirs))
    if "bias" in before.spare:
        encoder.spare = {**before.spare, "bias": rows(before.spare["bias"])}


def check_word_head(encoder: Any, who: str, instead: str = "") -> None:
    """Refuse an encoder that cannot guess words, neither by a head nor by what its model file has for one."""
    if WORDS not in encoder.heads and not encoder.spare:
        raise UserError(
            f"{who} has no masked-LM head, so it cannot predict words; take a model folder that has one, or make "
            f"one: pretrain('text.txt', keep_head=True){instead}"
        )


def need_word_head(encoder: Any, who: str) -> WordHead:
    """The masked-LM head of an encoder, taken from its model file if need be, or a sentence that it has none."""
    check_word_head(encoder, who)
    if WORDS not in encoder.heads:
        put_word_head(encoder)
        encoder.heads[WORDS].requires_grad_(False)
    return encoder.heads[WORDS]


def _names(places: tuple[str, str, str]) -> dict[str, list[str]]:
    dense, norm, bias = places
    old = {"weight": "gamma", "bias": "beta"}  # as the first BERT files have it
    return {
        **{f"dense.{part}": [f"{dense}.{part}"] for part in ("weight", "bias")},
        **{f"norm.{part}": [f"{norm}.{part}", f"{norm}.{old[part]}"] for part in ("weight", "bias")},
        "bias": [bias],
    }
