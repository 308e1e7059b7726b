"""Training a head on hidden states that a frozen backbone makes once: kept in a store and read at every step."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from smallbert.errors import UserError
from smallbert.features.building import NoRoom, Say, build_store
from smallbert.features.plan import plan_store, states_fingerprint, tokens_fingerprint
from smallbert.features.room import Room
from smallbert.features.store import Store, many, open_store
from smallbert.model.batch import Batch
from smallbert.model.encoder import Encoder
from smallbert.model.words import WORDS
from smallbert.texts.batches import Layout, make_batch
from smallbert.texts.data import STUDENT, Stream, Tokens
from smallbert.training.phase import BACKBONE, HELD_STAGE, Phase

READ = {"all": "all tokens", "first": "first tokens", "mean": "each text's mean"}


@dataclass
class Frozen:
    """Batches that bring their hidden states along.

    A head that reads one vector a text is given batches of one token a text: input_ids (texts, 1), hidden
    (1, texts, 1, width).
    """

    store: Store
    stream: Stream
    layers: list[int]
    single: bool  # one vector a text is all that is read
    _room: Room = field(default_factory=Room, repr=False)

    def make_batch(self, index: np.ndarray, layout: Layout, slots: int) -> Batch:
        """Some texts with their hidden states, laid out as data.make_batch lays them out."""
        batch = make_batch(self.stream, index, Layout(False, 1) if self.single else layout, slots=slots)
        real = batch.tokens().numpy().ravel()
        shape = (len(self.layers), batch.input_ids.numel(), self.store.about["width"])
        hidden = self._room.take(shape, self.store.kind)
        hidden.numpy()[:, ~real] = 0
        self.store.read(index, self.layers, self.single, hidden, torch.from_numpy(np.flatnonzero(real)))
        laid = hidden.unflatten(1, tuple(batch.input_ids.shape))
        return replace(batch, hidden=laid, numbers=tuple(self.layers))


@contextmanager
def keep_states(
    phase: Phase, place: Path | None, say: Say, shared: bool = False, stores: dict[Path, Store] | None = None
) -> Iterator[Frozen | None]:
    """Hidden states for a phase that does not change them: out of the folder that the user named, or made in `place`.

    None where the backbone must run at every step, where it is not frozen at all, and where each text is read once, so
    that storing saves nothing; unless they are `shared`, read by other phases too. Without a place they are kept in a
    folder that is gone when the phase ends. What is made is opened, and its checksums compared, once for all phases
    that have `stores` in common.
    """
    asked = phase.settings.store
    if phase.settings.freeze != "backbone" or asked == "none":
        yield None
        return
    given = None if asked == "auto" else Path(asked).expanduser()
    why = why_not(phase)
    if why is None and given is None and not shared and phase.settings.epochs <= 1:
        why = "each text is read once"
    if why is not None:
        if given is not None:
            raise UserError(f"stored hidden states cannot be used here: {why}; write store='none'")
        phase.notes.append(f"the frozen backbone ran at every step, without dropout: {why}")
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="smallbert-") as aside:
        where = place or Path(aside) / "states"
        yield _take(phase, given) if given is not None else _make(phase, where, say, {} if stores is None else stores)


def why_not(phase: Phase) -> str | None:
    """Why the backbone must run at every step although it is frozen; None where it need not."""
    encoder = phase.encoder
    # What earlier phases settled (their zeros) changes no weight that is frozen.
    changed = [t for t in phase.transforms if t.stage != HELD_STAGE and any(n.startswith(BACKBONE) for n in t.names)]
    reasons = {
        "a method changes its weights in the forward pass": bool(changed),
        "a method reads its inner states or routes its layers": bool(phase.taps) or phase.route is not None,
        "a teacher reads the same batches": bool(phase.teachers) or len(phase.stream.views) > 1,  # type: ignore[union-attr]
        "its texts are drawn anew": phase.stream.draw is not None,  # type: ignore[union-attr]
        "the connections between its layers are trained": encoder.connections is not None,
        "the stride around its layers is trained": encoder.stride is not None,
        "the head reads padding": any(getattr(head, "padded_to", 0) for head in encoder.heads.values()),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def needed(encoder: Encoder) -> tuple[list[int], str]:
    """What its heads read of hidden states: their numbers, 0 the embedding output, and "all", "first" or "mean"."""
    heads = [head for name, head in encoder.heads.items() if name != WORDS]  # which never reads stored states
    last, every = len(encoder.order), range(len(encoder.order) + 1)
    reads = {number for head in heads for number in getattr(head, "reads", [last])}
    if encoder.mixture is not None:  # gates look at all; any mixture may be told how far to go from the last
        reads |= {*getattr(encoder.mixture, "reads", every), last}
    many = encoder.mixture is not None or any(hasattr(head, "reads") for head in heads)
    alone = encoder.mixture is None or encoder.mixture.streams  # each token is mixed on its own
    tokens = "all"
    if alone and all(_reads_first(head) for head in heads):
        tokens = "first"
    elif not many and all(
        getattr(head, "pool", "") == "mean" and head.kind in ("classify", "regress") for head in heads
    ):
        tokens = "mean"
    return sorted(reads or {last}), tokens


def _reads_first(head: Any) -> bool:
    inner = getattr(head, "head", head)  # of a pooler that mixes for a plain head
    return bool(inner.reads_first) or (getattr(head, "whole", False) and getattr(head, "tokens", "") == "first")


def _make(phase: Phase, place: Path, say: Say, stores: dict[Path, Store]) -> Frozen | None:
    """Build a store of what the heads need, or finish or open the one that is there; None where there is no room."""
    assert phase.stream is not None
    layers, tokens = needed(phase.encoder)
    # One vector a text takes little room, and may as well be exact.
    what: Any = {"layers": layers, "tokens": tokens, "dtype": "float16" if tokens == "all" else "float32"}
    folder = place / plan_store(phase.encoder, phase.stream, **what).about["store"]
    try:
        if folder not in stores:
            stores[folder] = build_store(phase.encoder, phase.stream, folder, **what, say=say)
        return _opened(phase, stores[folder])
    except NoRoom as error:
        phase.notes.append(f"the frozen backbone ran at every step, without dropout: {error}")
        return None


def _take(phase: Phase, folder: Path) -> Frozen:
    """The store that the user named, if it is one of this model and these texts and holds what the heads read."""
    assert phase.stream is not None
    store, (wanted, tokens) = open_store(folder), needed(phase.encoder)
    wrong = {
        "of another model": store.about["model"] != states_fingerprint(phase.encoder),
        "of other texts (or of these, truncated at another length)": store.about["data"]
        != tokens_fingerprint(phase.stream.views[STUDENT]),
        f"of the layers {store.layers}, and the head reads {wanted}": not set(wanted) <= set(store.layers),
        f"of {store.about['tokens']} tokens, and the head reads {tokens}": store.about["tokens"] not in ("all", tokens),
    }
    for what, holds in wrong.items():
        if holds:
            raise UserError(f"the store in {folder} is {what}; build one of this model and task, or write store='auto'")
    return _opened(phase, store)


def _opened(phase: Phase, store: Store) -> Frozen:
    assert phase.stream is not None
    stream, (numbers, tokens) = phase.stream, needed(phase.encoder)
    single = tokens == "first" or store.about["tokens"] != "all"
    if single:
        view = stream.views[STUDENT]
        firsts = view.offsets[:-1]
        one = Tokens(view.ids[firsts], view.types[firsts], np.arange(len(view) + 1))
        stream = Stream({STUDENT: one}, stream.labels, stream.kind)
    kept = f"{many(len(numbers), 'hidden state')} of {READ[store.about['tokens']]} in {store.about['dtype']}"
    phase.notes.append(
        f"the frozen backbone ran once, without dropout: {kept} ({store.bytes / 1e6:,.1f} MB), read at every step"
    )
    return Frozen(store, stream, numbers, single)
