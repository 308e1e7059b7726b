# The studies of results/rates: the learning rate of the trimmed students of a model other than the one it was chosen with.
#
#   bash benchmarks/rates.sh sst2 all-mpnet-base-v2 DATA runs/all-mpnet-base-v2 [JOBS]
#
# First `trimmed10` learns at four rates and is scored on texts held out of train (OUT/choose); then all trimmed presets
# and their controls learn at the best of them, with all of train, and are scored on dev (OUT/sst2).
set -e
source "$(dirname "$0")/arguments.sh"
students() { python3 "$(dirname "$0")/students.py" "$model" --task "$what" --data "$data" --jobs "$jobs" "$@" "${more[@]}"; }
students --out "$out/choose" --presets trimmed10 --controls none --rates 0.1,0.2,0.4,1 --split choose
best=$(python3 - "$out/choose" <<'PYTHON'
import sys

from smallbert.measuring.shelf import load_cards

cards = [card for card in load_cards(sys.argv[1]) if card["scores"] and card["preset"] != "teacher"]
best = max(cards, key=lambda card: card["scores"][card["headline"]]["value"])["preset"]
print(best.split(" at ")[1].split()[0] if " at " in best else 1)
PYTHON
)
echo "best rate: $best of the preset's"
students --out "$out/$what" --presets trimmed20,trimmed10,trimmed3 --rates "$best"
