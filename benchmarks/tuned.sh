# The searches of results/tuned: what tuning a fine-tuned baseline and a pooler gains.
#
#   bash benchmarks/tuned.sh all-MiniLM-L6-v2 DATA runs [OPTIONS OF TUNE]
#
# 1,500 rows of SST-2; trials are chosen by rows held out of them, final runs are scored on dev.
set -e
model=${1:?a model} data=${2:?a folder of data} out=${3:?a folder to write} more=("${@:4}")
search() {
  python3 -m smallbert tune "$model" --task sst2 --data "$data" --examples 1500 --jobs 2 --seeds 1,2,3 "${more[@]}" \
    --trials "$2" --recipe "$3" --out "$out/$1"
}
search pooler 60 "pool_layers(width={8, 16, 32}) + train(freeze='backbone', epochs={1, 2, 4, 8}, lr=log(1e-4, 1e-2))"
search baseline 24 "finetune(lr=log(1e-5, 5e-4), epochs={1, 2, 3}, batch={16, 32})"
