"""Layer dropping: fewer layers, everything else as it was. The cheapest real speed-up there is."""

from typing import Any, Literal

from smallbert.errors import UserError
from smallbert.methods import Method
from smallbert.model.anatomy import check_layers
from smallbert.model.surgery import counterpart, keep_layers


class DropLayers(Method):
    """Keep some layers and drop the rest.

    keep: number of layers to keep, fewer than there are, or their share, between 0 and 1; at least one layer
    which: which layers to keep: 'even', evenly up to the last; 'spread', evenly from the first to the last; 'first';
        'last'; 'ends', half of them from either end

    Of twelve layers, counted from 0, the six kept are:

    even    1, 3, 5, 7, 9, 11        spread  0, 2, 4, 7, 9, 11, as DistilBERT has them
    ends    0, 1, 2, 9, 10, 11       first   0, 1, 2, 3, 4, 5        last    6, 7, 8, 9, 10, 11
    """

    keep: int | float = 0.5
    which: Literal["even", "spread", "first", "last", "ends"] = "even"

    def check(self) -> None:
        """A count of layers, or a share of them."""
        if not (0 < self.keep if isinstance(self.keep, int) else 0 < self.keep < 1):
            raise UserError(
                f"drop_layers: keep is a number of layers (1, 2, …) or a share between 0 and 1, not {self.keep}"
            )

    def plan(self, encoder: Any, task: Any) -> dict[str, Any]:
        """Which layers stay."""
        check_layers(encoder, self.name)
        total = len(encoder.order)
        keep = self.keep if isinstance(self.keep, int) else max(1, round(self.keep * total))
        if not 1 <= keep < total:
            raise UserError(
                f"drop_layers(keep={self.keep}): the model has {total} layers, so keep must be 1 to {total - 1}"
            )
        return {"layers": CHOICES[self.which](keep, total)}

    def build(self, encoder: Any, plan: dict[str, Any]) -> None:
        """Cut."""
        keep_layers(encoder, plan["layers"])


CHOICES = {
    "even": lambda keep, total: [counterpart(layer, keep, total) - 1 for layer in range(1, keep + 1)],
    "spread": lambda keep, total: [round(place * (total - 1) / max(1, keep - 1)) for place in range(keep)],
    "first": lambda keep, total: list(range(keep)),
    "last": lambda keep, total: list(range(total - keep, total)),
    "ends": lambda keep, total: [*range((keep + 1) // 2), *range(total - keep // 2, total)],
}
