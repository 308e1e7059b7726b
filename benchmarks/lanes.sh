# Several studies of benchmarks/ on one GPU at a time, for so many seconds; what is not finished goes on next time.
#
#   bash benchmarks/lanes.sh 540 MODELS DATA runs "poolers/large poolers/depth" "poolers/small:2:all-mpnet-base-v2"
#
# Each quoted lane is done one study after the other, the lanes side by side; a study is SCRIPT/WHAT[:JOBS[:MODEL]],
# with one job and e5-small where nothing is said, and SCRIPT one that takes WHAT MODEL DATA OUT JOBS: layer_mixing,
# pruning, poolers, students or quantisation. MODELS holds a folder for each model. Cards and a log for each study are in
# runs/SCRIPT/MODEL, and all cards so far in runs/cards.tar.gz, written anew every twenty seconds and at the end, to be
# taken away from a machine that will be gone. Ends with 1 where a study failed; one that time ran out for has not.
seconds=${1:?for how many seconds} models=${2:?a folder of models} data=${3:?a folder of data} out=${4:?a folder to write}
lanes=("${@:5}")
here=$(cd "$(dirname "$0")" && pwd)
end=$((SECONDS + seconds))
export PYTHONPATH=$here/../src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

# One daemon for all lanes, where there is one: their kernels overlap instead of taking turns.
if command -v nvidia-cuda-mps-control > /dev/null && [ -z "$CUDA_MPS_PIPE_DIRECTORY" ]; then
  CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d)
  export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY=$CUDA_MPS_PIPE_DIRECTORY
  nvidia-cuda-mps-control -d && trap 'echo quit | nvidia-cuda-mps-control; rm -rf "$CUDA_MPS_PIPE_DIRECTORY"' EXIT
fi

# Cores are shared as well, as by smallbert/machine/sharing.py.
all=0
for lane in "${lanes[@]:?studies to run}"; do
  most=1
  for study in $lane; do
    IFS=: read -r _ jobs _ <<< "$study"
    most=$((${jobs:-1} > most ? jobs : most))
  done
  all=$((all + most))
done
export OMP_NUM_THREADS=$((all < $(nproc) ? $(nproc) / all : 1))

count_cards() { cat "$1"/cards.jsonl "$1"/cards/*.json 2> /dev/null | grep -c '"model_fingerprint"'; }

run_lane() {
  failed=0
  for study in $1; do
    IFS=: read -r name jobs model <<< "$study"
    script=${name%/*} what=${name#*/} jobs=${jobs:-1} model=${model:-e5-small}
    left=$((end - SECONDS)) own=$out/$script/$model
    [ "$left" -gt 5 ] || { echo "$model $what: no time left"; continue; }
    mkdir -p "$own"
    began=$SECONDS
    # An interrupt lets a run save where it is, for which a study waits half a minute.
    timeout -s INT -k 40 "$left" bash "$here/$script.sh" "$what" "$models/$model" "$data" "$own" "$jobs" \
      >> "$own/$what.log" 2>&1
    code=$?
    echo "$model $what: exit code $code, $((SECONDS - began)) s, $(count_cards "$own/$what") cards"
    [ "$code" = 137 ] && [ "$SECONDS" -ge "$end" ] && code=124 # time ran out, and it did not stop when asked to
    case $code in 0 | 124) ;; *) failed=1; tail -n 3 "$own/$what.log" ;; esac
  done
  return $failed
}

gather_cards() {
  (cd "$out" && find . -path '*/cards/*.json' -o -name cards.jsonl | tar -czf cards.part -T - && mv cards.part cards.tar.gz)
}

mkdir -p "$out"
while sleep 20; do gather_cards; done 2> /dev/null & # a card that is just being written may not be found: next time
gathering=$!
running=()
for lane in "${lanes[@]}"; do run_lane "$lane" & running+=($!); done
failed=0
for one in "${running[@]}"; do wait "$one" || failed=1; done
kill "$gathering"
gather_cards
exit $failed
