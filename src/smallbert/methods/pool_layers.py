"""BERT-Vision's poolers: a head that reads the hidden states of all layers and tokens.

The paper trains one on stored states of an encoder that was fine-tuned before:

    finetune(epochs=1) | pool_layers + train(freeze="backbone", epochs=1, lr=1e-3)

and leaves training in the same pass as the encoder to later: pool_layers(detach=True) + finetune, where the encoder
learns by its plain head exactly as it would without, and the pooler beside it. The pooler predicts afterwards.
"""

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from smallbert.errors import UserError
from smallbert.methods import Method
from smallbert.model.encoder import HEAD, PLAIN
from smallbert.model.heads import Head, losses
from smallbert.model.mixing import Mixture, check_free, chosen_states
from smallbert.model.pooling import (
    AdapterPooler,
    AttentionPooler,
    MixturePooler,
    Pooler,
    Projection,
    initialise,
)
from smallbert.texts.data import usable_length

BESIDE_RATE = 1e-3  # a new pooler learns little at the rate that suits the encoder it stands beside
MIXTURE_RATE = 1e-2  # as in mix_layers


class PoolLayers(Method):
    """Put a head on the encoder that reads the hidden states of all layers.

    kind: 'adapter' projects every state to `width` dimensions and reads all of them; 'mix' is a plain head on a
        learned mixture of the layers; 'attention' weighs all layers and tokens by one learned query
    width: dimensions to which each token's state is projected
    tokens: what an adapter reads of a text: each position by itself, the mean of its tokens, or the first token
    masked: whether padding is left out; if not, all texts are padded to one length and the padding is read too
    layers: indices of the hidden states to read; 0 is the embedding output, -1 the last layer, None all
    norm: 'feature' brings each token's state to mean 0 and variance 1 before it is read
    dropout: rate of dropout on the head's input
    length: positions that are read; None takes those of the task's longest text
    detach: learn beside the plain head in the same pass; the encoder learns from the plain head alone
    beside: learn beside the plain head in the same pass; the encoder learns from both
    lr: learning rate of the pooler; None takes the phase's, or 0.001 beside a plain head
    """

    stage: ClassVar[int] = 5
    pools: ClassVar[bool] = True

    kind: Literal["adapter", "mix", "attention"] = "adapter"
    width: int = 16
    tokens: Literal["positions", "mean", "first"] = "positions"
    masked: bool = True
    layers: list[int] | None = None
    norm: Literal["none", "feature"] = "none"
    dropout: float = 0.1
    length: int | None = None
    detach: bool = False
    beside: bool = False
    lr: float | None = None

    def check(self) -> None:
        """What fits together."""
        if self.width < 1 or (self.length is not None and self.length < 1):
            raise UserError(f"pool_layers: width and length are 1 or more, not {self.width} and {self.length}")
        if not 0 <= self.dropout < 1:
            raise UserError(f"pool_layers: dropout is a share from 0 to below 1, not {self.dropout}")
        if self.kind != "adapter" and self.tokens != "positions":
            raise UserError(f"pool_layers: tokens={self.tokens!r} is for kind='adapter'; leave it out")
        if self.kind == "mix" and not self.masked:
            raise UserError("pool_layers: a mix is read by a plain head, which reads no padding; leave masked out")
        if self.kind == "mix" and self.width != type(self).width:
            raise UserError(f"pool_layers: a mix does not project states; leave width={self.width} out")
        if self.length is not None and self.masked and not self._positions:
            raise UserError(f"pool_layers: length={self.length} is for positions and for masked=False; leave it out")
        if self.detach and self.beside:
            raise UserError("pool_layers: detach leaves the encoder to the plain head, beside does not; write one")

    @property
    def parallel(self) -> bool:
        """Whether the plain head learns in the same pass."""
        return self.detach or self.beside

    def plan(self, encoder: Any, task: Any) -> dict[str, Any]:
        """Which hidden states are read, and for what kind of answers; the head that is there knows."""
        check_free(encoder, self.name)
        head, whole = encoder.head, encoder.head.kind in ("classify", "regress")
        if not whole and (not self.masked or self.tokens != "positions" or self.length is not None):
            raise UserError(
                "pool_layers: for tags and answers each token is read by itself; leave out tokens, masked and length"
            )
        fixed = whole and self.kind != "mix" and (not self.masked or self._positions)
        return {
            "reads": chosen_states(encoder, self.layers, self.name),
            "kind": head.kind,
            "labels": list(head.labels),
            "outputs": head.out.out_features,
            "pool": head.pool if isinstance(head, Head) else "first",
            "length": usable_length(encoder, self.length, task) if fixed else 0,
        }

    @property
    def _positions(self) -> bool:
        return self.kind == "adapter" and self.tokens == "positions"

    def build(self, encoder: Any, plan: dict[str, Any]) -> None:
        """The pooler is the head that predicts; the plain one stays as a second one if it learns beside it."""
        pooler = self._make(encoder, plan)
        rate = self.lr or (BESIDE_RATE if self.parallel else None)
        if rate is not None:
            pooler.own_rate = rate  # type: ignore[assignment]
        if self.parallel:
            encoder.heads[PLAIN] = encoder.head
        elif PLAIN in encoder.heads:
            del encoder.heads[PLAIN]
        encoder.heads[HEAD] = pooler.to(encoder.device)

    def _make(self, encoder: Any, plan: dict[str, Any]) -> Pooler:
        kind, outputs, labels, reads = (plan[name] for name in ("kind", "outputs", "labels", "reads"))
        if self.kind == "mix":
            mixture = Mixture(reads, self.norm, self.dropout)
            mixture.own_rate = MIXTURE_RATE  # type: ignore[assignment]
            return MixturePooler(Head(kind, outputs, encoder.backbone.config, labels, plan["pool"]), mixture)
        project = Projection(encoder.width, self.width, self.norm, self.dropout)
        padded_to = 0 if self.masked else plan["length"]
        if self.kind == "attention":
            return AttentionPooler(kind, outputs, labels, reads, project, padded_to)
        return AdapterPooler(kind, outputs, labels, reads, project, self.tokens, plan["length"], padded_to)

    def fill(self, encoder: Any, before: Any, plan: dict[str, Any], task: Any, seed: int) -> None:
        """Draw the new weights."""
        pooler = encoder.head.to("cpu")
        std = getattr(encoder.backbone.config, "initializer_range", 0.02)
        initialise(pooler, std, torch.Generator().manual_seed(seed))
        pooler.to(encoder.device)

    def fits(self, phase: Any, steps: int | None) -> None:
        """Beside a plain head it learns, or never."""
        if self.parallel and steps == 0:
            raise UserError(
                "a pooler beside the plain head learns in the same pass, so write it in the same phase: "
                "pool_layers(detach=True) + finetune"
            )

    def attach(self, phase: Any) -> None:
        """Beside a plain head, that is the one whose scores teach the encoder."""
        if not self.parallel:
            return
        phase.head = PLAIN
        if self.detach:  # gradients are clipped by their joint norm, and the encoder must not feel the pooler's
            phase.clipped_apart.update(phase.encoder.head.parameters())

    def loss(self, step: Any) -> dict[str, Tensor]:
        """The pooler's own, on the states that the encoder has made for its plain head."""
        if not self.parallel or step.batch.labels is None:
            return {}
        pooler, states = step.phase.encoder.head, step.states.hidden
        scores = pooler([state.detach() for state in states] if self.detach else states, step.batch)
        return {"pooler": step.mean(losses(pooler, scores, step.batch), step.batch.labelled)}
