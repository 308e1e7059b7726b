"""The recipes of the study `best` of pruning.sh: dense, and what scored highest in the screen, at 10 % and at 3 %.

    python benchmarks/best_of_screen.py runs/screen/study.json

The screen scores on a part of train, so dev has no say in the choice.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

LESS = 0.3  # from 10 % of the weights to 3 %


def main() -> None:
    """Print three recipes with semicolons between them."""
    study = json.loads(Path(sys.argv[1]).read_text())
    if study["split"] != "choose":
        sys.exit(f"{sys.argv[1]} scores on {study['split']}, which is not for choosing")
    recipes = {arm["name"]: arm["recipe"] for arm in study["arms"]}
    ended = {run["arm"]: run["score"] for run in study["runs"] if run["status"] == "ok" and run["arm"] != "dense"}
    best = recipes[max(ended, key=ended.__getitem__)]
    fewer = re.sub(r"\bkeep=([0-9.]+)", lambda found: f"keep={float(found[1]) * LESS:g}", best)
    print(f"{recipes['dense']}; {best}; {fewer}")


if __name__ == "__main__":
    main()
