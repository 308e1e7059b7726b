# The studies of results/rates: the learning rate of the trimmed students of a model other than the one it was chosen with.
#
#   bash benchmarks/rates.sh WHAT all-mpnet-base-v2 DATA runs/all-mpnet-base-v2 [JOBS]
#
# WHAT is sst2, snli or qqp. First `trimmed10` learns SST-2 at four rates and is scored on texts held out of train
# (OUT/choose, made once); then trimmed presets and their controls learn WHAT at the best of them, with all of train, and
# are scored on dev (OUT/WHAT).
set -e
source "$(dirname "$0")/arguments.sh"
students() { python3 "$(dirname "$0")/students.py" "$model" --data "$data" --jobs "$jobs" "$@" "${more[@]}"; }
[ -e "$out/choose/study.md" ] || students --task sst2 --out "$out/choose" --presets trimmed10 --controls none --rates 0.1,0.2,0.4,1 --split choose
best=$(python3 - "$out/choose" <<'PYTHON'
import sys

from smallbert.measuring.shelf import load_cards

cards = [card for card in load_cards(sys.argv[1]) if card["scores"] and card["preset"] != "teacher"]
best = max(cards, key=lambda card: card["scores"][card["headline"]]["value"])["preset"]
print(best.split(" at ")[1].split()[0] if " at " in best else 1)
PYTHON
)
echo "best rate: $best of the preset's"
case $what in
sst2) settings=(--presets trimmed20,trimmed10,trimmed3) ;;
snli) settings=(--presets trimmed20,trimmed10 --teacher "finetune(epochs=3, lr=5e-5, batch=128)" --epochs 4) ;;
qqp) settings=(--presets trimmed20,trimmed10,trimmed3 --teacher "finetune(epochs=2, lr=5e-5, batch=256)" --epochs 3 --batch 256) ;;
*) echo "unknown study: $what"; exit 2 ;;
esac
students --task "$what" --out "$out/$what" --rates "$best" "${settings[@]}"
