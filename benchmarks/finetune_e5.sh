#!/usr/bin/env bash
# Fine-tunes e5-small on five GLUE tasks, three seeds each, on one GPU. Run it in a folder that holds e5-small/ (the
# model) and glue/ (the official files); the cards land in runs/TASK/cards. Settings were fixed beforehand: three epochs
# on the large task, five on the small ones, learning rate 5e-5, batches of 32.
set -euo pipefail
export SMALLBERT_DATA=.
for task in sst2 mrpc rte stsb cola; do
  epochs=5
  if [ "$task" = sst2 ]; then epochs=3; fi
  python3 -m smallbert compare e5-small --task "$task" --recipes "finetune(epochs=$epochs)" --seeds 0,1,2 --out "runs/$task"
done
