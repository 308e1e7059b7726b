# The studies of results/poolers: a head that reads all layers, beside the controls that cost as much or less.
#
#   bash benchmarks/poolers.sh WHAT e5-small DATA runs/e5-small [JOBS [OPTIONS OF STUDY, such as --report-only --pack]]
#
# WHAT is small, large, answers, partial, forms, depth or eighth; DATA holds glue/ and squad/. The model may be
# all-mpnet-base-v2 as well, with a folder of its own. A study goes on where it was when it is run again; arms that begin
# alike train that beginning once; `--pack` puts the cards into one file.
set -e
source "$(dirname "$0")/arguments.sh"
once="finetune(epochs=1, lr=5e-5)"
frozen="train(freeze='backbone', epochs=1, lr=1e-3)"
names="own head; adapter; head, one more epoch; new head; scalar mix; two epochs; in parallel"
arms="$once; $once | pool_layers(kind='adapter', width=16) + $frozen; $once | $frozen; $once | head + $frozen;
  $once | pool_layers(kind='mix') + $frozen; finetune(epochs=2, lr=5e-5); pool_layers(width=16, detach=True) + $once"

case $what in
small)  # the paper's Table 1 on its small tasks, with fair controls
  study --task mrpc,rte,cola,stsb --seeds 0,1,2,3,4 --names "$names" --recipes "$arms" ;;
large)  # the same where a run takes minutes
  study --task sst2,qnli,qqp --seeds 0 --names "$names" --recipes "$arms" ;;
answers)  # the same for spans, the paper's Algorithm 1
  study --task squad --seeds 0 --names "$names" --recipes "$arms" ;;
partial)  # how little fine-tuning is enough: every tenth of an epoch, and what a pooler makes of it
  study --task squad --seeds 0 --names "own head; adapter" --recipes "$once; $once | pool_layers(width=16) + $frozen" \
    --vary finetune.epochs=0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9,1.0 ;;
forms)  # which kind of pooler, with and without padding, and what learning in parallel does
  pool() { echo "$once | pool_layers($1) + $frozen"; }
  study --task mrpc,rte,cola,stsb --seeds 0,1,2,3,4 \
    --names "adapter; with padding, as published; means; first tokens; attention; scalar mix; in parallel; in parallel, gradient not stopped; pooler alone from the start" \
    --recipes "$(pool "width=16"); $(pool "width=16, masked=False, dropout=0.0"); $(pool "width=16, tokens='mean'");
      $(pool "width=16, tokens='first'"); $(pool "kind='attention', width=64"); $(pool "kind='mix'");
      pool_layers(width=16, detach=True) + $once; pool_layers(width=16, beside=True) + $once;
      pool_layers(width=16, lr=1e-3) + $once" ;;
depth)  # what can be cut: poolers that read the lower layers alone, and the layers above them gone; a plain head there
  cut() { echo "$once | pool_layers(width=16, layers=$1) + $frozen | cut_to_mixture"; }
  study --task mrpc,rte,sst2 --seeds 0,1,2 --names "all; up to 10; up to 8; up to 6; up to 4; new head on 8" \
    --recipes "$once | pool_layers(width=16) + $frozen; $(cut "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]");
      $(cut "[0, 1, 2, 3, 4, 5, 6, 7, 8]"); $(cut "[0, 1, 2, 3, 4, 5, 6]"); $(cut "[0, 1, 2, 3, 4]");
      $once | drop_layers(8, which='first') | head + $frozen" ;;
eighth)  # whether an adapter on a cut encoder gains by its layers or by its tokens; small enough for two cores
  cut="$once | drop_layers(8, which='first')"
  study --task mrpc --seeds 0,1,2 --names "adapter up to 8; head on all tokens of 8; head on the first; the same, lr 1e-2" \
    --recipes "$once | pool_layers(width=16, layers=[0, 1, 2, 3, 4, 5, 6, 7, 8]) + $frozen | cut_to_mixture;
      $cut | head(pool='mean') + $frozen; $cut | head + $frozen; $cut | head + ${frozen/1e-3/1e-2}" ;;
*) echo "unknown study: $what"; exit 2 ;;
esac
