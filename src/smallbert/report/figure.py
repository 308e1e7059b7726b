"""What all pictures share: paper, colours, font, a quiet frame, and how they are written."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from smallbert.errors import UserError
from smallbert.machine.files import write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Each role has its own colour, so that the SVG can name the role where the PNG has the colour.
COLOURS = {"ink": "#1d1c1a", "muted": "#77726a", "rule": "#e4e0d9", "accent": "#b3362b", "paper": "#fffefd"}
COLOURS |= {"other": "#2f6690"}  # against the accent, where two are compared
PNG_DPI = 200
FONTS = ("Helvetica Neue", "Helvetica", "Arial", "Liberation Sans", "DejaVu Sans")


def new_figure(size: tuple[float, float]) -> "Figure":
    """An empty picture of so many inches on our paper."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("figures need matplotlib; run: pip install -e '.[report]'") from error
    figure = Figure(figsize=size, dpi=100, facecolor=COLOURS["paper"])
    FigureCanvasAgg(figure)
    return figure


def strip_frame(axes: "Axes", grid: Literal["x", "y"] | None, title: str = "", labels: float = 9) -> None:
    """Leave of a frame what is read: the line below, quiet labels, a title at the left, thin lines to compare by."""
    axes.set_facecolor("none")
    if grid is not None:
        axes.grid(axis=grid, color=COLOURS["rule"], linewidth=0.8)
        axes.set_axisbelow(True)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="both", colors=COLOURS["muted"], labelsize=labels, length=0)
    axes.set_title(title, loc="left", fontsize=labels + 1, color=COLOURS["ink"])


def to_png(figure: "Figure", path: Path | str) -> None:
    """Write a figure as a picture, whole or not at all."""
    write_file(path, lambda aside: figure.savefig(aside, format="png", dpi=PNG_DPI))


@cache
def font_name() -> str:
    """The first of our fonts that is there; asking for one that is not would make matplotlib complain."""
    from matplotlib.font_manager import fontManager

    there = set(fontManager.get_font_names())
    return next((font for font in FONTS if font in there), "sans-serif")
