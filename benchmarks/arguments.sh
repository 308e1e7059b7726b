# Read by the scripts of studies, which are called with WHAT MODEL DATA OUT [JOBS [OPTIONS OF STUDY]].
what=${1:?which study} model=${2:?a model} data=${3:?a folder of data} out=${4:?a folder to write}
jobs=${5:-8} more=("${@:6}")
study() { python3 -m smallbert study "$model" --data "$data" --jobs "$jobs" --out "$out/$what" "$@" "${more[@]}"; }
