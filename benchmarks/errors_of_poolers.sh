#!/usr/bin/env bash
# The error analysis of BERT-Vision (RTE and MRPC: what each model tends to say, who is right where) with our models: an
# encoder after one epoch with its own head (A) against an AdapterPooler trained on its frozen states (B).
#
#   bash benchmarks/errors_of_poolers.sh e5-small DATA runs [SEED [DEVICE]]
#
# DATA holds glue/. Models land in runs/TASK-SEED/, what is found in runs/TASK-SEED/errors; run again, it goes on where
# it was. B starts from A itself, so that the two differ by the pooler alone; entailment counts as positive.
set -euo pipefail
model=$1 data=$2 out=$3 seed=${4:-0} device=${5:-}
more=(--data "$data" --seed "$seed" ${device:+--device "$device"})
pooler='pool_layers(kind="adapter", width=16) + train(freeze="backbone", epochs=1, lr=1e-3)'
for task in rte mrpc; do
  place=$out/$task-$seed
  mkdir -p "$place"
  # A run that learned nothing ends with 1 and leaves its model all the same; the comparison then says so.
  python3 -m smallbert finetune "$model" --task "$task" --epochs 1 --out "$place/baseline" "${more[@]}" || [ $? = 1 ]
  python3 -m smallbert compress "$place/baseline" --task "$task" --recipe "$pooler" --out "$place/pooler" "${more[@]}" || [ $? = 1 ]
  python3 -m smallbert errors "$place/baseline" "$place/pooler" --task "$task" --data "$data" \
    ${device:+--device "$device"} --out "$place/errors" --examples 0  # 0: records of ours hold no texts of the data
done
python3 -m smallbert report "$out"
