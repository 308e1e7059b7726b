"""Students: a smaller model of the teacher's own family, copied, cut out of it or new; or any other checkpoint."""

from collections.abc import Collection
from dataclasses import fields
from typing import Any, Literal

from smallbert.errors import UserError
from smallbert.methods import Method
from smallbert.methods.drop_layers import CHOICES
from smallbert.model.anatomy import anatomy, check_layers
from smallbert.model.encoder import HEAD, load, skeleton
from smallbert.model.replace import (
    check_bare,
    draw_backbone,
    draw_heads,
    head_shape,
    pooler_of,
    replace_backbone,
    resized,
)
from smallbert.model.slicing import check_plain, slice_backbone
from smallbert.model.surgery import keep_layers
from smallbert.model.words import word_head_of
from smallbert.sources import folder_read
from smallbert.training.importance import weigh_by_loss

BETTER = "write start='slice' to cut them out of the teacher, or start='random' for a new model"


class Student(Method):
    """Make a smaller model of the encoder: fewer layers, optionally narrower; or take another checkpoint.

    layers: number of layers, or a list of those to take, counted from 0, in ascending order
    width: features of a hidden state; None: as before
    heads: attention heads of a layer: with a width or start='random' they share the width, else that many of the old
        heads are kept; None: as many of the old size as fill the width, or, if none do exactly, as many as before
    ffn: inner neurons of a layer's feed-forward network; None: as before, in proportion to the width
    start: 'copy' takes whole layers as they are; 'slice' cuts smaller ones out of them; 'random' draws new weights
    which: which layers, where `layers` is a number: 'even', evenly up to the last; 'spread', evenly from the first to
        the last; 'first'; 'last'; 'ends', half of them from either end
    model: another model to take as it is, with its own tokenizer: a folder, or a name on the hub; None makes one of the
        encoder
    by: which features, heads and neurons a slice keeps: 'size', those of the largest weights; 'loss', those of the
        largest |weight * gradient| on the task
    examples: most training texts, drawn at random, for the gradient of by='loss'

    student(4)                                       four layers, evenly spaced, copied
    student(4, width=312, ffn=1200, start='slice')   the features, heads and neurons with the largest weights
    student(4, heads=2, start='slice', by='loss')    those without which the task's loss would rise most
    student(4, width=312, start='random')            a new model of that shape
    student(model='google/bert_uncased_L-4_H-256_A-4')
    """

    layers: int | list[int] = 4
    width: int | None = None
    heads: int | None = None
    ffn: int | None = None
    start: Literal["copy", "slice", "random"] = "copy"
    which: Literal["even", "spread", "first", "last", "ends"] = "even"
    model: str | None = None
    by: Literal["size", "loss"] = "size"
    examples: int = 512

    def check(self) -> None:
        """Sizes from 1; another model comes as it is."""
        sizes = [self.width, self.heads, self.ffn, *(() if isinstance(self.layers, list) else (self.layers,))]
        if any(size is not None and size < 1 for size in sizes):
            raise UserError(
                f"student: layers, width, heads and ffn must be whole numbers from 1, unlike {self.brief()}"
            )
        if self.examples < 1 or (self.by == "loss" and self.start != "slice"):
            raise UserError(
                "student: by='loss' chooses what to cut out by some examples, so write start='slice', not "
                f"{self.brief()}"
            )
        if self.examples != type(self).examples and self.by != "loss":
            raise UserError(f"student: examples={self.examples} tell the gradient for by='loss'; leave it out")
        if self.start == "random" and self.which != type(self).which:
            raise UserError(f"student: start='random' draws all layers anew, so leave out which={self.which!r}")
        if isinstance(self.layers, list) and self.which != type(self).which:
            raise UserError(f"student: layers={self.layers} names each layer, so leave out which={self.which!r}")
        as_it_is = {field.name: field.default for field in fields(self)}
        if self.model is not None and {**self.settings(), "model": None} != as_it_is:
            raise UserError(
                f"student(model={self.model!r}) takes that model as it is; cut it further by "
                f"student(model={self.model!r}) | student(4)"
            )

    def reads(self, marks: Collection[str] = ()) -> str:
        """Another model in a folder."""
        return folder_read(self.model, marks)

    def plan(self, encoder: Any, task: Any) -> dict[str, Any]:
        """Which layers stay and how large they become; or all that another model says of its shape."""
        if self.model is not None:
            check_bare(encoder, self.name)
            other = load(self.model)
            ready = bool(HEAD in encoder.heads and HEAD in other.heads and _alike(encoder.head, other.head))
            taken = pooler_of(other) is not None
            return {"config": other.base, "history": other.history, "ready": ready, "from_pooler": taken}
        check_layers(encoder, self.name)
        plan: dict[str, Any] = {"layers": self._layers(len(encoder.order))}
        if self.width is self.heads is self.ffn is None and self.start != "random":
            return plan
        config, row = encoder.backbone.config, anatomy(encoder.backbone)
        if not row.q:
            raise UserError(
                f"student: a model of type {encoder.family!r} has no heads, so only its layers can be chosen"
            )
        count, size = head_shape(encoder)
        old = {"width": encoder.width, "heads": count, "ffn": getattr(config, row.inner), "size": size}
        sizes = self._sizes(old)
        if sizes == old and self.start != "random":  # asked for what is there
            return plan
        self._check_sizes(encoder, old, sizes)
        if self.start == "slice":
            check_plain(encoder, plan["layers"])
        return {**plan, "sizes": sizes, **({"from_pooler": False} if self.start == "random" else {})}

    def build(self, encoder: Any, plan: dict[str, Any]) -> None:
        """Another model's shape, or the same family with fewer layers, then with other sizes."""
        if self.model is not None:
            new = skeleton(plan["config"])
            new.replay(plan["history"])
            new.pooler = pooler_of(new)
            replace_backbone(encoder, new)
            encoder.mixture, encoder.connections, encoder.stride = new.mixture, new.connections, new.stride
            encoder.second = new.second
            if encoder.device.type == "meta":  # an estimate, which nobody fills
                encoder.tokenizer = load(self.model).tokenizer
            if plan["ready"]:
                encoder.heads = new.heads
            return
        keep_layers(encoder, plan["layers"])
        if sizes := plan.get("sizes"):
            new = resized(encoder, sizes["width"], sizes["heads"], sizes["size"], sizes["ffn"])
            for name, module in encoder.backbone.named_modules() if self.start == "slice" else ():
                if facts := getattr(module, "held_facts", None):
                    new.backbone.get_submodule(name).held_facts = set(facts)
            replace_backbone(encoder, new)

    def fill(self, encoder: Any, before: Any, plan: dict[str, Any], task: Any, seed: int) -> None:
        """The other model's weights; or what was cut out or drawn. Copied layers have theirs already."""
        if self.model is not None:
            other = load(self.model)
            encoder.tokenizer, encoder.spare = other.tokenizer, word_head_of(other)
            if plan["ready"]:
                encoder.load_state_dict(other.state_dict())
                return
            theirs = {name: tensor for name, tensor in other.state_dict().items() if not name.startswith("heads.")}
            encoder.load_state_dict(theirs, strict=False)  # all but heads, which are of this task
            if (found := pooler_of(other)) is not None and (mine := pooler_of(encoder, plan)) is not None:
                mine.load_state_dict(found.state_dict())
            draw_heads(encoder, seed, keep_dense=plan["from_pooler"])
        elif sizes := plan.get("sizes"):
            if self.start == "random":
                draw_backbone(encoder, seed)
            else:
                importance = self._importance(before, task, seed) if self.by == "loss" else None
                slice_backbone(encoder, before, plan["layers"], sizes["heads"], sizes["size"], importance)

    def _importance(self, encoder: Any, task: Any, seed: int) -> Any:
        if task is None:
            raise UserError("student(by='loss') needs a task's loss: give --task, or write by='size'")
        return weigh_by_loss(encoder, task, self.examples, seed)

    def _layers(self, total: int) -> list[int]:
        if isinstance(self.layers, list):
            if not self.layers or sorted(set(self.layers)) != self.layers or not 0 <= self.layers[-1] < total:
                raise UserError(
                    f"student: layers={self.layers} is not a list of layers of this model, from 0 to {total - 1} "
                    "and in order, such as [0, 2]"
                )
            return list(self.layers)
        if self.layers > total:
            raise UserError(
                f"student: {self.layers} layers were asked for, but the model has {total}, so that {total} is the most"
            )
        return CHOICES[self.which](self.layers, total)

    def _sizes(self, old: dict[str, int]) -> dict[str, int]:
        """Every size that was not given: heads of the old size where that fits, inner neurons in proportion."""
        width, size = self.width or old["width"], old["size"]
        same = self.width is None or width % size
        heads = self.heads or (old["heads"] if same else width // size)
        if self.width is not None or self.start == "random":
            if width % heads:
                raise UserError(
                    f"student: a width of {width} does not split into {heads} equal heads; give heads that divide it"
                )
            size = width // heads
        return {
            "width": width,
            "heads": heads,
            "ffn": self.ffn or max(1, round(old["ffn"] * width / old["width"])),
            "size": size,
        }

    def _check_sizes(self, encoder: Any, old: dict[str, int], sizes: dict[str, int]) -> None:
        row, old_size = anatomy(encoder.backbone), old["size"]
        if (
            row.style == "mobilebert"
            or encoder.stride is not None
            or getattr(encoder.mixture, "look", None) is not None
        ):
            raise UserError(
                "student: a model with bottlenecks, a stride or gates that read the first token cannot be given "
                "another width; make it narrow first and put those after it"
            )
        if self.start == "copy":
            raise UserError(f"student: start='copy' keeps every size but the number of layers; {BETTER}")
        if self.start == "slice":
            grown = [name for name in ("width", "heads", "ffn") if sizes[name] > old[name]]
            if grown or sizes["size"] > old_size:
                what = f"{grown[0]}={sizes[grown[0]]}" if grown else f"a head of {sizes['size']} dimensions"
                most = f"{grown[0]}={old[grown[0]]}" if grown else f"one of {old_size}"
                raise UserError(f"student: {what} cannot be cut out of {most}; ask for less, or write start='random'")
            if row.style == "modernbert" and sizes["size"] != old_size and sizes["size"] % 2:
                raise UserError(
                    f"student: heads with rotary positions have an even size, not {sizes['size']}; give another "
                    "width or number of heads"
                )


def _alike(one: Any, other: Any) -> bool:
    return one.kind == other.kind and one.pool == other.pool and list(one.labels) == list(other.labels)
