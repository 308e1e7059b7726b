# The studies of results/layer_mixing: what a learned mixture of layers does, alone and under pruning, with its controls.
#
#   bash benchmarks/layer_mixing.sh WHAT e5-small DATA runs [JOBS [OPTIONS OF STUDY, such as --report-only --pack]]
#
# WHAT is tasks, large, probing, rebuilt, pruning, cures, convergence or pretraining; DATA holds glue/, snli/, squad/,
# probing/ and, for pretraining, corpora/.
# A study goes on where it was when it is run again; `--pack` then puts its cards into one file.
set -e
source "$(dirname "$0")/arguments.sh"
last="finetune(epochs=3, lr=5e-5)"
masks="begin=0.125, finish=0.875"
loop="watch(500) + train(epochs=8, lr=3e-5, warmup=0.125, weight_decay=0.0, freeze='embeddings')"
ten=9,25,39,52,59,63,77,87,91,96

case $what in
tasks)  # the paper's Table 2
  study --task sst2,mrpc,snli --seeds 9,25,39 --names "last layer; mixture" --recipes "$last; mix_layers | $last" ;;
large)  # the same where a run takes minutes
  study --task qqp,squad --seeds 9 --names "last layer; mixture" --recipes "$last; mix_layers | $last" ;;
probing)  # the paper's Tables 1 and 12, and the controls
  low="finetune(epochs=3, lr=1e-5)" frozen="finetune(epochs=3, lr=1e-3, freeze='backbone')"
  study --task length,content,bshift,tense,subj,obj,somo,coord --seeds 63,77,9,96,39 --split test \
    --names "last; mixture; last 1e-5; mixture 1e-5; last frozen; mixture frozen" \
    --recipes "$last; mix_layers | $last; $low; mix_layers | $low; $frozen; mix_layers | $frozen" ;;
rebuilt)  # the same on sentences of treebanks
  data=$data/probing/rebuilt
  study --task tense,subj,obj,somo,coord,top,depth,length,bshift,content --seeds 63,77,9,96,39 --split test \
    --names "last; mixture" --recipes "$last; mix_layers | $last" ;;
pruning)  # the paper's Table 3, and what is left of the mixture's model when it is cut to what it reads
  mixed="mix_layers + movement(keep=0.1, $masks) + $loop" cut="cut_to_mixture(0.95, weigh='variation')"
  again="train(epochs=1, lr=3e-5, weight_decay=0.0, freeze='embeddings')"
  study --task sst2 --seeds $ten --names "plain; mixture; mixture, cut; mixture, cut, one more epoch" \
    --recipes "movement(keep=0.1, $masks) + $loop; $mixed; $mixed | $cut; $mixed | $cut | $again" ;;
cures)  # does anything else save the plain model?
  study --task sst2 --seeds 9,25 \
    --names "four layers; eight layers; one threshold; slow scores; fine-tuned first; with a teacher; last layer normalised; magnitude" \
    --recipes "drop_layers(4, which='first') | movement(keep=0.1, $masks) + $loop;
      drop_layers(8, which='first') | movement(keep=0.1, $masks) + $loop;
      movement(keep=0.1, scope='global', $masks) + $loop;
      movement(keep=0.1, lr=1e-3, $masks) + $loop;
      finetune(epochs=3, lr=3e-5) | movement(keep=0.1, $masks) + $loop;
      finetune(epochs=3, lr=3e-5) | movement(keep=0.1, $masks) + distill + $loop;
      mix_layers(layers=[-1]) + movement(keep=0.1, $masks) + $loop;
      magnitude(keep=0.1, $masks) + $loop" ;;
convergence)  # the paper's Figure 5
  study --task mrpc,cola,rte --seeds 9,25,39 --names "last layer; mixture" --vary epochs=0.25,0.5,1,2,4 \
    --recipes "$last; mix_layers | $last" ;;
pretraining)  # the paper's open question: does a mixture help a model that reads its first text?
  new="student(6, width=256, heads=4, ffn=1024, start='random')"
  read="pretrain('$data/corpora', steps=10000, lr=1e-3, batch=64) + watch(250, examples=512)"
  task="finetune(epochs=3, lr=1e-4, batch=64)"
  study --task sst2 --seeds 0,1,2 --names "last layer; mixture; mixture, no dropout" --recipes "$new | $read | $task;
    $new | mix_layers + $read | $task; $new | mix_layers(dropout=0.0) + $read | $task" ;;
*) echo "unknown study: $what"; exit 2 ;;
esac
