# The studies of results/quantisation: what weights in few bits cost, each against the same model in float32.
#
#   bash benchmarks/quantisation.sh WHAT e5-small DATA runs/e5-small [JOBS [OPTIONS OF STUDY, such as --report-only --pack]]
#
# WHAT is sst2, mrpc, qqp or squad; DATA holds glue/ and squad/. The model may be all-MiniLM-L6-v2 as well. All arms of a
# seed begin with one fine-tuned model, which is trained once; where that takes minutes there is one seed and there are
# fewer arms. A study goes on where it was when it is run again.
set -e
source "$(dirname "$0")/arguments.sh"
case $what in
sst2) seeds=0,1,2 dense="finetune(epochs=3, lr=7e-5, batch=64)" again="batch=64" ;;
mrpc) seeds=0,1,2,3,4 dense="finetune(epochs=5, lr=5e-5, batch=32)" again="batch=32" ;;
qqp) seeds=0 dense="finetune(epochs=3, lr=1e-4, batch=256)" again="batch=256" ;;
squad) seeds=0 dense="finetune(epochs=3, lr=1e-4, batch=64)" again="batch=64" ;;
*) echo "unknown study: $what"; exit 2 ;;
esac
names="float32" recipes="$dense"
arm() { names+="; $1" recipes+="; $dense | $2"; }
# Groups of 64 along a row share a scale, which is searched; with feedback, GPTQ on 512 training texts.
grouped() { echo "scope='group', search=True, embeddings=$1"; }
# A teacher of the same size, the model itself before rounding, as TernaryBERT has it.
taught="align('hidden') + distill(alpha=1.0) + train(epochs=3, lr=5e-5, $again)"

arm "8 bits" "quantize(8)"
arm "8 bits, inputs too" "quantize(8, activations=True)"
arm "8 bits, inputs by fixed ranges" "quantize(8, activations='static')"
arm "8 bits, inputs by fixed ranges, smoothed" "quantize(8, activations='static', smooth=0.5)"
arm "8 bits, inputs by fixed ranges, scaled" "quantize(8, activations='static', smooth='search')"
arm "8 bits, trained" "quantize_aware(8) + train(epochs=1, lr=2e-5, $again)"
arm "8 bits, scaled, trained" "quantize_aware(8, smooth='search') + train(epochs=1, lr=2e-5, $again)"
arm "8 bits, scaled, trained, taught" "quantize_aware(8, smooth='search') + distill(alpha=1.0) + train(epochs=1, lr=2e-5, $again)"
arm "float32, trained on" "train(epochs=1, lr=2e-5, $again)"
for bits in 4 3 2; do
  arm "$bits bits" "quantize($bits, $(grouped 4))"
  arm "$bits bits, feedback" "quantize($bits, $(grouped 4), feedback=True)"
done
arm "3 bits on average" "mixed_bits(3.0, embeddings=4)"
for bits in 4 3; do
  arm "centroids, $bits bits" "codebook($bits)"
  arm "centroids, $bits bits, feedback" "codebook($bits, feedback=True)"
done
# The paper's threshold, a log-density of -4, read on standardised weights: 1.3 % of all are outliers, not 0.04 %.
arm "centroids, 3 bits, more outliers, feedback" "codebook(3, outliers=2.48, feedback=True)"
arm "float32, taught" "$taught"
arm "centroids, 3 bits, trained" "codebook_aware(3) + $taught"
arm "ternary, trained" "ternary(embeddings=4) + $taught"
arm "4 bits, trained" "quantize_aware(4, activations=False, scope='group', embeddings=4) + $taught"
case $what in sst2|mrpc)  # a run of these takes minutes where examples are many
  arm "3 bits on average, trained" "mixed_bits(3.0, embeddings=4) + $taught"
  arm "2 bits, trained" "quantize_aware(2, activations=False, scope='group', embeddings=4) + $taught"
  arm "binary, trained" "binary(embeddings=4) + $taught"
  arm "binary, split from ternary, trained" "ternary(embeddings=4) + $taught | binary(split=True) + $taught" ;;
esac
study --task "$what" --seeds "$seeds" --names "$names" --recipes "$recipes"
