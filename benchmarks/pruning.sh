# The studies of results/pruning: which way of pruning weights is best, with and without a mixture and a teacher.
#
#   bash benchmarks/pruning.sh WHAT e5-small DATA runs [JOBS [OPTIONS OF STUDY, such as --report-only --pack]]
#
# WHAT is screen, best (after it), table4-snli, table4-qqp, table4-squad, table5 (SNLI and SQuAD, then QQP), table5-qqp (QQP alone), tickets or
# convergence; DATA holds glue/, snli/ and squad/. The stability study (Table 3) is `benchmarks/layer_mixing.sh pruning`. A
# study goes on where it was when it is run again.
#
# What differs from Tables 4 and 5 of the BERMo paper (its settings: its Tables 6 to 11), so that directions are compared here,
# never scores:
#
#                     the paper, MNLI / QQP / SQuAD                              here, SNLI / QQP / SQuAD
#   model             BERT-base, 12 layers of 768                               e5-small, 12 layers of 384
#   training data     MNLI's 393k pairs                                         a file of 100k of SNLI's 549k pairs instead
#   epochs            6 / 10 / 10                                               6 / 6 / 6
#   learning rate     3e-5 / 3e-6 / 3e-5                                        3e-5 / 6e-5 / 3e-5
#   batch             32 / 32 / 16                                              32 / 128 / 32
#   warmup            12,000 / 11,000 / 5,400 steps, about an epoch             a tenth of the steps
#   begin of the ramp 1 / 2 / 1 such warmups: about 0.16 / 0.19 / 0.10          0.125
#   its finish        1 / 3 / 2 of them before the end: about 0.84 / 0.71 / 0.80  0.75
#   rate of L0 masks  1e-1 / 1e-2 / 1e-1                                        1e-1
#   pull of L0        50 (with the mixture 45) / 50 / 175                       50 / 50 / 175, with and without the mixture
#   Table 5, student  starts from the pretrained encoder                        starts from its teacher
#
# The same are: 10 % kept in every matrix of the layers, embeddings frozen, no weight decay, scores at 1e-2 from zero, a cubic
# ramp, pulls of soft movement 200 / 150 / 500, and a teacher with alpha 0.9 at temperature 2. One seed is run here.
set -e
what=$1 model=$2 data=$3 out=$4 jobs=${5:-8} more=("${@:6}")
study() { python3 -m smallbert study "$model" --data "$data" --jobs "$jobs" --out "$out/$what" "$@" "${more[@]}"; }
masks="begin=0.125, finish=0.75"
loop="train(epochs=6, lr=3e-5, warmup=0.1, weight_decay=0.0, freeze='embeddings')"
wide="train(epochs=6, lr=6e-5, batch=128, warmup=0.1, weight_decay=0.0, freeze='embeddings')"

# The same arms for a task: $1 its training, $2 and $3 the pulls of soft movement and of L0.
four_ways() {
  for mixture in "" "mix_layers + "; do
    echo "${mixture}magnitude(0.1, $masks) + $1; ${mixture}movement(0.1, $masks) + $1;"
    echo "${mixture}soft_movement(pull=$2, $masks) + $1; ${mixture}l0(pull=$3) + $1;"
  done
}
# Movement with a teacher, without and with a mixture: $1 its training.
with_teacher() {
  for mixture in "" "mix_layers + "; do
    echo "finetune(epochs=3) | ${mixture}movement(0.1, $masks) + distill + $1;"
  done
}
names="magnitude; movement; soft movement; L0; mixture, magnitude; mixture, movement; mixture, soft movement; mixture, L0"

case $what in
screen)  # candidates for the best recipe at 10 %, chosen on a part of train; the first five are of an earlier, smaller screen
  dense="finetune(epochs=3, lr=5e-5)" scores="distill(alpha=0.9, temperature=2.0)" states="align('hidden')"
  slow="train(epochs=10, lr=1e-4, batch=64, weight_decay=0.0)" fast="train(epochs=10, lr=3e-4, batch=64, weight_decay=0.0)"
  wide="train(epochs=12, lr=5e-4, batch=128, weight_decay=0.0)" ramp="begin=0.05, finish=0.7" drop="first=0.5, begin=0.05, finish=0.7"
  study --task sst2 --seeds 9 --split choose \
    --names "dense; magnitude, slow; one threshold, slow; one threshold; one threshold, mixture, slow; magnitude; magnitude, 1e-3; magnitude, states; one threshold, states; smooth movement, states; second order, states; movement from sizes, states; magnitude, mixture, states; six layers, states; magnitude, states, twice as long" \
    --recipes "$dense;
      $dense | magnitude(0.1, $drop) + $scores + $slow;
      $dense | magnitude(0.1, scope='global', $drop) + $scores + $slow;
      $dense | magnitude(0.1, scope='global', $drop) + $scores + $fast;
      $dense | mix_layers(init='plain') + magnitude(0.1, scope='global', $drop) + $scores + $slow;
      $dense | magnitude(0.1, $drop) + $scores + $wide;
      $dense | magnitude(0.1, $drop) + $scores + ${wide/5e-4/1e-3};
      $dense | magnitude(0.1, $drop) + $states + $scores + $wide;
      $dense | magnitude(0.1, scope='global', $drop) + $states + $scores + $wide;
      $dense | smooth_movement(0.1, $ramp) + $states + $scores + $wide;
      $dense | second_order(0.1, begin=0.05, finish=0.75, gradients=512) + $states + $scores + $wide;
      $dense | movement(0.1, init='magnitude', $ramp) + $states + $scores + $wide;
      $dense | mix_layers(init='plain') + magnitude(0.1, $drop) + $states + $scores + $wide;
      $dense | drop_layers(6) | magnitude(0.2, $drop) + $states + $scores + $wide;
      $dense | magnitude(0.1, $drop) + $states + $scores + ${wide/12/24}" ;;
best)  # what won the screen, on dev, with ten seeds, at 10 % and at 3 %
  study --task sst2 --seeds 9,25,39,52,59,63,77,87,91,96 --names "dense; 10 %; 3 %" \
    --recipes "$(python3 "$(dirname "$0")/best_of_screen.py" "$out/screen/study.json")" ;;
table4-snli)  # the paper's Table 4; SNLI stands in for MNLI
  study --task snli --seeds 9 --names "$names" --recipes "$(four_ways "$loop" 200 50)" ;;
table4-qqp)
  study --task qqp --seeds 9 --names "$names" --recipes "$(four_ways "$wide" 150 50)" ;;
table4-squad)
  study --task squad --seeds 9 --names "$names" --recipes "$(four_ways "$loop" 500 175)" ;;
table5)  # the paper's Table 5: a teacher
  study --task snli,squad --seeds 9 --names "movement; mixture, movement" --recipes "$(with_teacher "$loop")" ;&  # and on
table5-qqp)
  what=table5-qqp
  study --task qqp --seeds 9 --names "movement; mixture, movement" --recipes "$(with_teacher "$wide")" ;;
tickets)  # lottery, reweighted proximal pruning and Gordon's control, with what they are to be read beside
  finish="finetune(epochs=3)"
  study --task sst2,mrpc --seeds 9,25,39 \
    --names "dense; ticket; pruned at once; random; deleted, free to grow; reweighted" \
    --recipes "$finish; lottery(0.3, rounds=7, what='layers', part=train(epochs=3, lr=5e-5)); prune(0.3) | $finish;
      prune(0.3, by='random') | $finish; delete_information(0.3, scope='global', what='layers') | $finish; rpp + train(epochs=3) | $finish" ;;
convergence)  # the paper's Figure 5: how many epochs pruning needs
  study --task snli --seeds 9 --names "plain; mixture" --vary epochs=2,4,6,8,10 \
    --recipes "movement(0.1, $masks) + $loop; mix_layers + movement(0.1, $masks) + $loop" ;;
*) echo "unknown study: $what"; exit 2 ;;
esac
