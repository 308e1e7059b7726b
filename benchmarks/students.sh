# The studies of results/students: every preset of distillation against the same student without a teacher.
#
#   bash benchmarks/students.sh WHAT e5-small DATA runs/e5-small [JOBS [OPTIONS OF students.py OR OF STUDY]]
#
# WHAT is sst2, mrpc, snli or qqp, or int8: what the students that are fast on a CPU keep of SST-2 when they compute in
# 8 bits. DATA holds glue/ and snli/. The model may be all-mpnet-base-v2 as well, whose students are also a checkpoint
# beside it, all-MiniLM-L6-v2. A study goes on where it was when it is run again.
set -e
source "$(dirname "$0")/arguments.sh"
task=$what
case $what in
sst2 | int8) task=sst2 seeds=0,1,2 teacher="finetune(epochs=3, lr=7e-5, batch=64)" epochs=6 batch=128 ;;
mrpc) seeds=0,1,2 teacher="finetune(epochs=5, lr=5e-5, batch=32)" epochs=20 batch=32 ;;
snli) seeds=0,1,2 teacher="finetune(epochs=3, lr=1e-4, batch=128)" epochs=4 batch=128 ;;
qqp) seeds=0,1,2 teacher="finetune(epochs=3, lr=1e-4, batch=256)" epochs=3 batch=256 ;;
*) echo "unknown study: $what"; exit 2 ;;
esac
if [ "$what" = int8 ]; then
  more+=(--presets pkd6,minilmv2,rosita,tinybert4,pkd3,bilstm,bilstm-trimmed,bilstm-tiny,trimmed20 --controls none)
  more+=(--then "quantize(8, activations=True)")
fi
case $model in *mpnet*) more+=(--checkpoint "$(dirname "$model")/all-MiniLM-L6-v2") ;; esac
python3 "$(dirname "$0")/students.py" "$model" --task "$task" --data "$data" --jobs "$jobs" --out "$out/$what" \
  --teacher "$teacher" --epochs "$epochs" --batch "$batch" --copies "$out/copies" --seeds "$seeds" "${more[@]}"
