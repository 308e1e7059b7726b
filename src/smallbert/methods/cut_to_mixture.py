"""Cutting a model to what its mixture reads: layers above the last one that matters do nothing but cost time."""

from itertools import accumulate
from typing import Any

from smallbert.errors import UserError
from smallbert.methods import Method
from smallbert.model.surgery import keep_layers


class CutToMixture(Method):
    """Drop the layers above the last one that the learned mixture still reads."""

    mass: float = 0.95  # how much of the mixture must lie in what stays

    def check(self) -> None:
        """A share."""
        if not 0 < self.mass <= 1:
            raise UserError(f"cut_to_mixture: mass is a share above 0 and up to 1, not {self.mass}")

    def plan(self, encoder: Any, task: Any) -> dict[str, Any]:
        """The layers that hold the mass, from the bottom up; all of them where the top is read too."""
        shares = encoder.reading
        if shares is None:
            raise UserError(
                "cut_to_mixture cuts a model with a learned mixture, and this one has none: put mix_layers before it, "
                "as in mix_layers | finetune | cut_to_mixture"
            )
        # The sum of all shares is 1 but for rounding, and must never ask for a layer that is not there.
        enough = (number for number, sum_ in enumerate(accumulate(shares)) if sum_ >= self.mass - 1e-6)
        last = max(1, next(enough, len(encoder.order)))
        return {"layers": list(range(last)), "shares": [round(share, 4) for share in shares]}

    def build(self, encoder: Any, plan: dict[str, Any]) -> None:
        """Cut; the mixture's weights of what is gone go to what stays."""
        keep_layers(encoder, plan["layers"])
