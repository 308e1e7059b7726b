"""How tables of the docs write what several seeds came to."""

from collections.abc import Sequence
from statistics import mean, stdev


def to_cell(values: Sequence[float], lost: int, form: str = ".1f") -> str:
    """A mean, ± the standard deviation and how many where there are several; † says how many of them learned nothing.

    to_cell([98.0, 99.0, 97.0], 1)  ->  "98.0 ± 1.0 (3, 1 †)"
    """
    if not values:
        return ""
    several = len(values) > 1
    runs = ", ".join([str(len(values))] * several + [f"{lost} †"] * bool(lost))
    return f"{mean(values):{form}}" + (f" ± {stdev(values):.1f}" if several else "") + (f" ({runs})" if runs else "")
