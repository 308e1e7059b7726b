"""MobileBERT's student: many thin layers between bottlenecks, stacked feed-forward networks, no norms, small words.

Sun et al. 2020. It is transformers' own MobileBERT, so it is saved, loaded and exported as one.
"""

from typing import Any, Literal

import torch

from smallbert.errors import UserError
from smallbert.methods import Method
from smallbert.model.encoder import HEAD, plain_config
from smallbert.model.replace import bare, check_bare, check_words, draw_backbone, reduced_words, replace_backbone
from smallbert.texts.data import longest_input


class Bottleneck(Method):
    """Make a student of thin layers between bottlenecks, like MobileBERT.

    layers: number of layers
    width: features of the hidden states between layers
    inner: features within a layer
    heads: attention heads of a layer, which divide `inner` among them
    ffns: feed-forward networks of a layer, one after another
    ffn: inner neurons of each of them
    embed: dimensions of a word's embedding, at most the teacher's if copied; each position reads those of three
        neighbouring words
    values: input of attention's values: 'outside', the wide state between layers; 'inside', the narrow one within
    norm: 'none', a learned scale and shift in place of layer norms; 'layer', layer norms
    words: word embeddings: 'copy', the teacher's, reduced to their main directions for a smaller `embed`; 'new', random

    bottleneck                              MobileBERT: 24 layers, 512 wide outside and 128 inside, 25 M parameters
    bottleneck(ffns=2, values='inside')     MobileBERT-tiny
    """

    layers: int = 24
    width: int = 512
    inner: int = 128
    heads: int = 4
    ffns: int = 4
    ffn: int = 512
    embed: int = 128
    values: Literal["outside", "inside"] = "outside"
    norm: Literal["none", "layer"] = "none"
    words: Literal["copy", "new"] = "copy"

    def check(self) -> None:
        """Sizes that fit each other."""
        if min(self.layers, self.width, self.inner, self.heads, self.ffns, self.ffn, self.embed) < 1:
            raise UserError(f"bottleneck: every size must be a whole number from 1, unlike {self}")
        if self.inner % self.heads:
            raise UserError(f"bottleneck: inner={self.inner} does not split into {self.heads} equal heads")

    def plan(self, encoder: Any, task: Any) -> dict[str, Any]:
        """The config of the new model."""
        from transformers import MobileBertConfig

        check_bare(encoder, self.name)
        if self.words == "copy":
            check_words(encoder, self.embed, self.name)
        old = encoder.backbone.config
        config = MobileBertConfig(
            vocab_size=old.vocab_size,
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            intermediate_size=self.ffn,
            max_position_embeddings=min(longest_input(encoder), 512),
            embedding_size=self.embed,
            intra_bottleneck_size=self.inner,
            use_bottleneck_attention=self.values == "inside",
            num_feedforward_networks=self.ffns,
            normalization_type="no_norm" if self.norm == "none" else "layer_norm",
            pad_token_id=getattr(old, "pad_token_id", 0),
        )
        return {"config": plain_config(config), "from_pooler": False}

    def build(self, encoder: Any, plan: dict[str, Any]) -> None:
        """An empty one, and a head on it."""
        replace_backbone(encoder, bare(plan["config"], pooler=HEAD not in encoder.heads))

    def fill(self, encoder: Any, before: Any, plan: dict[str, Any], task: Any, seed: int) -> None:
        """Drawn, all but the words; padding is no word, and must be nothing beside one."""
        draw_backbone(encoder, seed)
        table = encoder.backbone.embeddings.word_embeddings
        with torch.no_grad():
            if self.words == "copy":
                table.weight.copy_(reduced_words(before, self.embed))
            if table.padding_idx is not None:
                table.weight[table.padding_idx].zero_()
