"""Tiny random encoders of every family, and a toy task, all made on the spot: for checking machinery in seconds."""

from __future__ import annotations

import hashlib
import json
import random
from typing import TYPE_CHECKING, Any

import torch

from smallbert.model.encoder import Encoder, new_backbone
from smallbert.tasks.task import Split, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SHAPE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 72,
    "pad_token_id": 0,
}

SHAPES: dict[str, dict[str, Any]] = {
    "bert": _SHAPE,
    "roberta": _SHAPE,
    "xlm-roberta": _SHAPE,
    "electra": {**_SHAPE, "embedding_size": 8},
    "distilbert": {
        "vocab_size": 100,
        "dim": 16,
        "n_layers": 4,
        "n_heads": 4,
        "hidden_dim": 32,
        "max_position_embeddings": 72,
        "pad_token_id": 0,
    },
    "albert": {**_SHAPE, "embedding_size": 8},
    "mpnet": _SHAPE,
    "modernbert": {
        **_SHAPE,
        "local_attention": 8,
        "global_attn_every_n_layers": 2,
        "cls_token_id": 2,
        "sep_token_id": 3,
        "bos_token_id": 2,
        "eos_token_id": 3,
    },
    "deberta-v2": {
        **_SHAPE,
        "relative_attention": True,
        "position_buckets": 8,
        "pos_att_type": ["p2c", "c2p"],
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "position_biased_input": False,
    },
    "mobilebert": {
        **_SHAPE,
        "embedding_size": 8,
        "intra_bottleneck_size": 16,
        "num_feedforward_networks": 2,
    },
}

# As wide as the widest student of a preset that is cut out of its teacher, with as many heads and inner neurons.
_WIDE = {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1200, "embedding_size": 128}
_WIDE |= {"dim": 384, "n_heads": 12, "hidden_dim": 1200}  # DistilBERT's names

WORDS = (
    "a the this that it film story plot acting music scene ending cast idea book food place was is seems feels looks "
    "great good lovely warm clever bright fine sweet moving sharp bad dull weak cold silly grey poor slow clumsy flat "
    "very rather quite not never always and but with of for in on to so too really"
).split()


GOOD = "great good lovely warm clever bright fine sweet moving sharp".split()
BAD = "bad dull weak cold silly grey poor slow clumsy flat".split()


def wide_shape(family: str) -> dict[str, int]:
    """What of a tiny encoder's config is different where students of the papers' widths are to be cut out of it."""
    return {name: size for name, size in _WIDE.items() if name in SHAPES[family]}


def make_task(train: int = 200, dev: int = 60, seed: int = 0) -> Task:
    """A toy task: is the one judging word of a sentence, such as "the film seems dull", a good one?"""
    draw = random.Random(seed)
    texts: dict[str, int] = {}
    while len(texts) < train + dev:
        label = len(texts) % 2
        texts[
            f"{draw.choice(('the', 'this', 'that'))} {draw.choice(WORDS[5:17])} {draw.choice(WORDS[17:22])} "
            f"{draw.choice(('very', 'rather', 'quite', 'really'))} {draw.choice(GOOD if label else BAD)}"
        ] = label
    rows = Split(list(texts), None, list(texts.values()), [str(number) for number in range(train + dev)])
    splits = {"train": rows.take(range(train)), "dev": rows.take(range(train, train + dev))}
    fingerprint = hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]
    note = "made-up sentences; scores on it mean nothing"
    return Task("toy", "classify", ("bad", "good"), ("accuracy",), 50.0, 32, note, fingerprint, splits=splits)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer over a hundred tokens, with the special tokens of BERT."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    names += [f"word{number}" for number in range(100 - len(names))]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    special = {f"{name.lower()}_token": f"[{name}]" for name in ("PAD", "UNK", "CLS", "SEP", "MASK")}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **special)


def make_encoder(family: str = "bert", seed: int = 0, **shape: Any) -> Encoder:
    """A tiny encoder of a family with random weights; `shape` overrides entries of its config."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        backbone = new_backbone({"model_type": family, **SHAPES[family], **shape})
        # All norms start at one and all biases at zero, which would hide a part read from the wrong place.
        with torch.no_grad():
            for parameter in backbone.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
            if family == "mobilebert":  # reads the word behind the last one too, which is nothing, or padding
                backbone.embeddings.word_embeddings.weight[0] = 0
    return Encoder(backbone, make_tokenizer()).eval()
