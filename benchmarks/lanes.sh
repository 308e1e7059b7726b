# Several studies of benchmarks/ on one GPU at a time, for so many seconds; what is not finished goes on next time.
#
#   bash benchmarks/lanes.sh 560 MODELS DATA runs "poolers/large poolers/depth" "poolers/small:2:all-mpnet-base-v2"
#
# Each quoted lane is done one study after the other, the lanes side by side; a study is SCRIPT/WHAT[:JOBS[:MODEL]],
# with one job and e5-small where nothing is said. MODELS holds a folder for each model. Cards and a log for each study
# are in runs/SCRIPT/MODEL.
seconds=$1 models=$2 data=$3 out=$4 lanes=("${@:5}")
here=$(cd "$(dirname "$0")" && pwd)
end=$((SECONDS + seconds))
export PYTHONPATH=$here/../src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

# One daemon for all lanes, where there is one: their kernels overlap instead of taking turns.
if command -v nvidia-cuda-mps-control > /dev/null && [ -z "$CUDA_MPS_PIPE_DIRECTORY" ]; then
  CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d)
  export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY=$CUDA_MPS_PIPE_DIRECTORY
  nvidia-cuda-mps-control -d && trap 'echo quit | nvidia-cuda-mps-control' EXIT
fi

run_lane() {
  for study in $1; do
    IFS=: read -r name jobs model <<< "$study"
    script=${name%/*} what=${name#*/} jobs=${jobs:-1} model=${model:-e5-small}
    left=$((end - SECONDS))
    [ "$left" -gt 5 ] || return
    own=$out/$script/$model
    mkdir -p "$own"
    began=$SECONDS
    # An interrupt lets a run save where it is.
    timeout -s INT -k 15 "$left" bash "$here/$script.sh" "$what" "$models/$model" "$data" "$own" "$jobs" \
      >> "$own/$what.log" 2>&1
    echo "$model $what: exit code $?, $((SECONDS - began)) s, $(find "$own/$what" -name '*-s*.json' | wc -l) cards"
  done
}

for lane in "${lanes[@]}"; do run_lane "$lane" & done
wait
