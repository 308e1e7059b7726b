# The studies of results/pruning: which way of pruning weights is best, with and without a mixture and a teacher.
#
#   bash benchmarks/pruning.sh WHAT e5-small DATA runs [JOBS [OPTIONS OF STUDY, such as --report-only --pack]]
#
# WHAT is screen, best (what the screen chose), table4-snli, table4-qqp, table4-squad, table5-snli, table5-qqp, table5-squad,
# tickets-sst2, tickets-mrpc or convergence; DATA holds glue/, snli/ and squad/. The stability study (Table 3) is
# `benchmarks/layer_mixing.sh pruning`. A study goes on where it was when it is run again.
#
# What differs from Tables 4 and 5 of the BERMo paper (its settings: its Tables 6 to 11), so that directions are compared here,
# never scores:
#
#                     the paper, MNLI / QQP / SQuAD                              here, SNLI / QQP / SQuAD
#   model             BERT-base, 12 layers of 768                               e5-small, 12 layers of 384
#   training data     MNLI's 393k pairs                                         a file of 100k of SNLI's 549k pairs instead
#   epochs            6 / 10 / 10                                               6 / 3 / 3
#   learning rate     3e-5 / 3e-6 (size and L0 3e-5) / 3e-5                     1e-4
#   batch             32 / 32 / 16                                              128 / 256 / 64
#   warmup            12,000 / 11,000 / 5,400 steps, about an epoch             a tenth of the steps
#   begin of the ramp 1 / 2 / 1 such warmups: about 0.16 / 0.19 / 0.10          0.125
#   its finish        1 / 3 / 2 of them before the end: about 0.84 / 0.71 / 0.80  0.75
#   rate of L0 masks  1e-1 / 1e-2 / 1e-1                                        1e-1
#   pull of L0        50 (with the mixture 45) / 50 / 175                       12.5, 25 and 50 / 25 / 87.5
#   pull of soft m.   200 / 150 / 500                                           50, 200 and 1000 / 750 / 2500
#   Table 5, student  starts from the pretrained encoder                        starts from its teacher
#
# Pulls are divided by the number of weights, of which this model has a quarter, and have a fifteenth of the steps to work in:
# what they leave differs, so that several are tried on SNLI. The same are: 10 % kept in every matrix of the layers, embeddings
# frozen, no weight decay, scores at 1e-2 from zero, a cubic ramp, and a teacher with alpha 0.9 at temperature 2. One seed is
# run here.
set -e
source "$(dirname "$0")/arguments.sh"
masks="begin=0.125, finish=0.75"
# Training as in Tables 4 and 5: $1 epochs, $2 texts a step.
training() { echo "train(epochs=$1, lr=1e-4, batch=$2, warmup=0.1, weight_decay=0.0, freeze='embeddings')"; }

# The arms of Table 4: $1 the training, then pairs of pulls of soft movement and of L0.
four_ways() {
  for mixture in "" "mix_layers + "; do
    echo "${mixture}magnitude(0.1, $masks) + $1; ${mixture}movement(0.1, $masks) + $1;"
    for pulls in "${@:2}"; do
      echo "${mixture}soft_movement(pull=${pulls% *}, $masks) + $1; ${mixture}l0(pull=${pulls#* }) + $1;"
    done
  done
}
fixed="magnitude; movement" pulled="soft movement; L0" other="soft movement, pulled more; L0, pulled less"
# The arms of Table 5, movement with a teacher, without and with a mixture: $1 the training, $2 texts a step.
with_teacher() {
  for mixture in "" "mix_layers + "; do
    echo "finetune(epochs=3, lr=1e-4, batch=$2) | ${mixture}movement(0.1, $masks) + distill + $1;"
  done
}
taught="movement; mixture, movement"
# Tickets: $1 the training of each part, $2 the pull of rpp.
tickets() {
  echo "finetune($1); lottery(0.3, rounds=7, what='layers', part=train($1)); prune(0.3) | finetune($1);"
  echo "prune(0.3, by='random') | finetune($1); delete_information(0.3, scope='global', what='layers') | finetune($1);"
  echo "rpp(pull=$2) + train($1) | finetune($1)"
}
parts="dense; ticket; pruned at once; random; deleted, free to grow; reweighted"

# What the candidates for the best recipe on SST-2 are made of.
dense="finetune(epochs=3, lr=7e-5, batch=64)" scores="distill(alpha=0.9, temperature=2.0)"
states="align('hidden')" close="align('hidden', weight=10.0)" closer="align('hidden', weight=100.0)"
wide="train(epochs=10, lr=5e-4, batch=128, weight_decay=0.0)" wider="train(epochs=10, lr=7e-4, batch=256, weight_decay=0.0)"
ramp="begin=0.05, finish=0.7" drop="first=0.5, begin=0.05, finish=0.7"

case $what in
screen)  # candidates for the best recipe at 10 % and at 3 % of the weights, scored on a part of train
  study --task sst2 --seeds 9 --split choose \
    --names "dense; scores alone; states; states, one threshold; states, 1e-3; states, no dropout; states, mixture; states, six layers; states, four layers; states, movement from sizes; states, smooth movement; close states; 3 %, states; smooth movement, close states; 3 %, smooth movement, close states; 3 %, smooth movement, closer states; 3 %, movement from sizes, close states; 3 %, smooth movement, close states, mixture; 3 %, smooth movement, close states, six layers; smooth movement, close states, 256 a step; 3 %, smooth movement, close states, 256 a step" \
    --recipes "$dense;
      $dense | magnitude(0.1, $drop) + $scores + $wide;
      $dense | magnitude(0.1, $drop) + $states + $scores + $wide;
      $dense | magnitude(0.1, scope='global', $drop) + $states + $scores + $wide;
      $dense | magnitude(0.1, $drop) + $states + $scores + ${wide/5e-4/1e-3};
      $dense | magnitude(0.1, $drop) + $states + $scores + ${wide/weight_decay/dropout=0.0, weight_decay};
      $dense | mix_layers(init='plain') + magnitude(0.1, $drop) + $states + $scores + $wide;
      $dense | drop_layers(6) | magnitude(0.2, $drop) + $states + $scores + $wide;
      $dense | drop_layers(4) | magnitude(0.3, $drop) + $states + $scores + $wide;
      $dense | movement(0.1, init='magnitude', $ramp) + $states + $scores + $wide;
      $dense | smooth_movement(0.1, $ramp) + $states + $scores + $wide;
      $dense | magnitude(0.1, $drop) + $close + $scores + $wide;
      $dense | magnitude(0.03, $drop) + $states + $scores + $wide;
      $dense | smooth_movement(0.1, $ramp) + $close + $scores + $wide;
      $dense | smooth_movement(0.03, $ramp) + $close + $scores + $wide;
      $dense | smooth_movement(0.03, $ramp) + $closer + $scores + $wide;
      $dense | movement(0.03, init='magnitude', $ramp) + $close + $scores + $wide;
      $dense | mix_layers(init='plain') + smooth_movement(0.03, $ramp) + $close + $scores + $wide;
      $dense | drop_layers(6) | smooth_movement(0.06, $ramp) + $close + $scores + $wide;
      $dense | smooth_movement(0.1, $ramp) + $close + $scores + $wider;
      $dense | smooth_movement(0.03, $ramp) + $close + $scores + $wider" ;;
best)  # what scored highest there at 10 % and at 3 %, on dev, with ten seeds
  study --task sst2 --seeds 9,25,39,52,59,63,77,87,91,96 --names "dense; 10 %; 3 %" \
    --recipes "$dense; $dense | smooth_movement(0.1, $ramp) + $close + $scores + $wide;
      $dense | smooth_movement(0.03, $ramp) + $closer + $scores + $wide" ;;
table4-snli)  # the paper's Table 4; SNLI stands in for MNLI, and here with pulls of the paper and others
  less="soft movement, pulled less; L0, pulled much less" ways="$fixed; $pulled; $less; $other"
  study --task snli --seeds 9 --names "$ways; mixture, ${ways//; /; mixture, }" \
    --recipes "$(four_ways "$(training 6 128)" "200 50" "50 12.5" "1000 25")" ;;
table4-qqp)  # pulls that on SNLI leave about 10 %, for soft movement and for L0
  study --task qqp --seeds 9 --names "$fixed; $other; mixture, ${fixed//; /; mixture, }; mixture, ${other//; /; mixture, }" \
    --recipes "$(four_ways "$(training 3 256)" "750 25")" ;;
table4-squad)
  study --task squad --seeds 9 --names "$fixed; $other; mixture, ${fixed//; /; mixture, }; mixture, ${other//; /; mixture, }" \
    --recipes "$(four_ways "$(training 3 64)" "2500 87.5")" ;;
table5-snli)  # the paper's Table 5: a teacher
  study --task snli --seeds 9 --names "$taught" --recipes "$(with_teacher "$(training 6 128)" 128)" ;;
table5-qqp)
  study --task qqp --seeds 9 --names "$taught" --recipes "$(with_teacher "$(training 3 256)" 256)" ;;
table5-squad)
  study --task squad --seeds 9 --names "$taught" --recipes "$(with_teacher "$(training 3 64)" 64)" ;;
tickets-sst2)  # lottery, reweighted proximal pruning and Gordon's control, with what they are to be read beside
  # rpp pulls a weight w to zero within T steps where w^2 < 2 * mean rate * pull * T: these pulls leave about 30 %
  study --task sst2 --seeds 9,25,39 --names "$parts" --recipes "$(tickets "epochs=3, lr=1e-4, batch=128" 0.027)" ;;
tickets-mrpc)
  study --task mrpc --seeds 9,25,39 --names "$parts" --recipes "$(tickets "epochs=5, lr=5e-5, batch=32" 0.146)" ;;
convergence)  # the paper's Figure 5: how many epochs pruning needs
  training=$(training 6 128)
  study --task snli --seeds 9 --names "plain; mixture" --vary epochs=2,4,6,8,10 \
    --recipes "movement(0.1, $masks) + $training; mix_layers + movement(0.1, $masks) + $training" ;;
*) echo "unknown study: $what"; exit 2 ;;
esac
