# The studies of results/layer_mixing: what a learned mixture of layers does, alone and under pruning, with its controls.
#   bash benchmarks/layer_mixing.sh tasks|pilots|probing MODEL DATA OUT [JOBS]
# MODEL is e5-small; DATA holds glue/, snli/ and probing/. Each study goes on where it was when run again.
set -e
what=$1 model=$2 data=$3 out=$4 jobs=${5:-8}
study() { python3 -m smallbert study "$model" --data "$data" --jobs "$jobs" "$@"; }

if [ "$what" = tasks ]; then  # the shape of the paper's Table 2
  study --task sst2,mrpc,snli --seeds 9,25,39 --names "last layer; mixture" --out "$out/tasks" \
    --recipes "finetune(epochs=3, lr=5e-5); mix_layers | finetune(epochs=3, lr=5e-5)"
fi

if [ "$what" = pilots ]; then  # movement pruning to a tenth, two seeds, before the study of ten
  masks="begin=0.125, finish=0.875"
  train="watch(500) + train(epochs=8, lr=3e-5, warmup=0.125, weight_decay=0.0, freeze='embeddings')"
  study --task sst2 --seeds 9,25 --names "plain; mixture; four layers" --out "$out/pilots" --recipes "
    movement(keep=0.1, $masks) + $train;
    mix_layers + movement(keep=0.1, $masks) + $train;
    drop_layers(4, which='first') | movement(keep=0.1, $masks) + $train"
fi

if [ "$what" = probing ]; then  # the shape of the paper's Tables 1 and 12, and the controls
  study --task length,content,bshift,tense,subj,obj,somo,coord --seeds 63,77,9,96,39 --split test --out "$out/probing" \
    --names "last; mixture; last 1e-5; mixture 1e-5; last frozen; mixture frozen" --recipes "
    finetune(epochs=3, lr=5e-5); mix_layers | finetune(epochs=3, lr=5e-5);
    finetune(epochs=3, lr=1e-5); mix_layers | finetune(epochs=3, lr=1e-5);
    finetune(epochs=3, lr=1e-3, freeze='backbone'); mix_layers | finetune(epochs=3, lr=1e-3, freeze='backbone')"
fi
