"""Presets that fine-tune, cut, prune and quantise."""

from smallbert.presets.distillation import FROM_THE_START
from smallbert.presets.preset import Preset, published, unpublished

SANH = "Sanh, Wolf and Rush 2020, Movement Pruning, arXiv:2005.07683"
BERMO = "BERMo: What can BERT learn from ELMo?, arXiv:2110.15802"
SANH_TABLE = "huggingface/transformers-research-projects, movement-pruning/README.md"
KURTIC = "Kurtic et al. 2022, The Optimal BERT Surgeon, arXiv:2203.07259"
JIANG = "Jiang et al. 2023, Pruning Pre-trained Language Models Without Fine-Tuning, arXiv:2210.06210"
CLOSE = "importance of PLATON, arXiv:2206.12562; states as in TinyBERT, arXiv:1909.10351; put together here"
DENSE, LONG = "finetune(epochs=3, lr=7e-5, batch=64)", "train(epochs=10, lr=5e-4, batch=128, weight_decay=0.0)"
SIX = "train(epochs=6, lr=3e-5, weight_decay=0.0, freeze='embeddings')"  # as Sanh et al. and BERMo train under masks


def _close(keep: float, weight: float) -> str:
    """Pruned to a share while every layer's states are held as close to the dense model's as `weight` says."""
    pruning = f"smooth_movement({keep}, begin=0.05, finish=0.7) + align('hidden', weight={weight}) + distill"
    return f"{DENSE} | {pruning} + {LONG} | sparse"


ROWS = [
    Preset(
        "baseline",
        "finetune",
        "Devlin et al. 2019, BERT, arXiv:1810.04805",
        "Fine-tune the whole encoder: what every small model is measured against.",
        published(
            SANH_TABLE,
            mnli={"accuracy": 84.5, "accuracy_mm": 84.9},
            qqp={"accuracy": 91.4, "f1": 88.4},
            squad={"em": 80.4, "f1": 88.1},
        ),
    ),
    Preset(
        "bermo",
        "mix_layers | finetune",
        BERMO,
        "Read a learned mixture of all layers; the paper's MNLI, QQP and SQuAD scores, also those of its own BERT, are "
        "well below what BERT-base usually reaches.",
        published(
            f"tables of {BERMO}",
            sst2={"accuracy": 92.43},
            mnli={"accuracy": 80.04, "accuracy_mm": 80.84},
            qqp={"accuracy": 88.27, "f1": 84.29},
            squad={"f1": 77.43},
        ),
    ),
    Preset(
        "truncate6",
        "drop_layers(6, which='first') | finetune",
        "Sajjad et al. 2020, Poor Man's BERT, arXiv:2004.03844",
        "Keep the first six layers, then fine-tune: the cheapest baseline for any claim about compression.",
        unpublished("the paper's table could not be checked"),
    ),
    Preset(
        "half",
        "finetune | drop_layers(0.5, which='even') | distill + train(epochs=3)",
        "Sanh et al. 2019, DistilBERT, arXiv:1910.01108, for keeping evenly spaced layers; here on the task alone",
        "Keep every second layer of the fine-tuned encoder, then distil the whole encoder into it.",
        unpublished("published students of this depth were distilled on a large corpus first"),
    ),
    Preset(
        "kd6",
        "finetune | drop_layers(6, which='first') | distill + train(epochs=3)",
        "Hinton et al. 2015, Distilling the Knowledge in a Neural Network, arXiv:1503.02531",
        "Keep the first six layers of the fine-tuned encoder, then distil its logits into them.",
        unpublished("no checked table of plain logit distillation into this student"),
    ),
    Preset(
        "gmp10",
        f"finetune | magnitude(0.1) + distill(alpha=0.9) + {SIX}",
        f"Zhu and Gupta 2017, To prune, or not to prune, arXiv:1710.01878; scores from {SANH}",
        "Gradually keep the largest 10 % of the encoder's weights while distilling; the published run starts from the "
        "pretrained encoder, this one from the fine-tuned.",
        published(
            SANH_TABLE,
            mnli={"accuracy": 78.3, "accuracy_mm": 79.3},
            qqp={"accuracy": 79.8, "f1": 65.0},
            squad={"em": 70.2, "f1": 80.1},
        ),
    ),
    Preset(
        "movement10",
        f"finetune | movement(0.1) + distill(alpha=0.9) + {SIX}",
        SANH,
        "Keep the 10 % of the encoder's weights that move away from zero, while distilling; the published run starts "
        "from the pretrained encoder, this one from the fine-tuned.",
        published(
            SANH_TABLE,
            mnli={"accuracy": 80.1, "accuracy_mm": 80.4},
            qqp={"accuracy": 89.7, "f1": 86.2},
            squad={"em": 75.6, "f1": 84.3},
        ),
    ),
    Preset(
        "soft10",
        f"finetune | soft_movement(pull=200) + distill(alpha=0.9) + {SIX}",
        SANH,
        "Keep the weights whose learned scores stay above a threshold, under a penalty on all scores, while "
        "distilling; the penalty decides how many are kept. The published run keeps about 10 % and starts from the "
        "pretrained encoder.",
        published(
            SANH_TABLE,
            mnli={"accuracy": 81.2, "accuracy_mm": 81.8},
            qqp={"accuracy": 90.2, "f1": 86.8},
            squad={"em": 76.6, "f1": 84.9},
        ),
    ),
    Preset(
        "l0-masks",
        f"finetune | l0(pull=50) + distill(alpha=0.9) + {SIX}",
        f"Louizos et al. 2018, arXiv:1712.01312; scores from {SANH}",
        "Random masks whose probability to be open is learned under a penalty, while distilling; the penalty decides "
        "how many weights are kept. The published run keeps 10 % and starts from the pretrained encoder.",
        published(
            SANH_TABLE,
            mnli={"accuracy": 78.7, "accuracy_mm": 79.7},
            qqp={"accuracy": 88.1, "f1": 82.8},
            squad={"em": 72.4, "f1": 81.9},
        ),
    ),
    Preset(
        "masks-only10",
        "finetune | movement(0.1, train_weights=False, begin=0.0, lr=2e-2) + distill(alpha=0.9) "
        "+ train(epochs=12, batch=64)",
        JIANG,
        "Learn which 10 % of the weights to keep, without training the weights themselves. The published run, SMP-S, "
        "takes the share of each matrix from the sizes of its weights, penalises scores, and predicts classes through "
        "word embeddings.",
        published(
            f"README of the code of {JIANG}",
            mnli={"accuracy": 83.7, "accuracy_mm": 83.6},
            qqp={"accuracy": 91.0, "f1": 87.9},
            squad={"em": 79.3, "f1": 87.2},
        ),
    ),
    Preset(
        "platon10",
        "finetune | smooth_movement(0.1) + distill(alpha=0.9) + train(epochs=6, lr=8e-5)",
        "Zhang et al. 2022, PLATON, arXiv:2206.12562",
        "Keep the 10 % of the weights that matter most to the loss, by importance smoothed over steps and its "
        "uncertainty; the published run has no teacher.",
        unpublished("the paper's table could not be checked"),
    ),
    Preset(
        "obert10",
        "finetune | second_order(0.1, begin=0.07, finish=0.87) + distill(alpha=1.0) + train(epochs=30, lr=5e-5)",
        KURTIC,
        "Prune in a few events the weights whose removal raises the loss least, by its curvature, and correct the "
        "others for it, while distilling. The published learning rate restarts after each event; ours decays once.",
        published(
            f"README of the code of {KURTIC}",
            mnli={"accuracy": 83.79, "accuracy_mm": 84.35},
            qqp={"accuracy": 91.35, "f1": 88.30},
            squad={"f1": 88.31},
        ),
    ),
    Preset(
        "ticket30",
        "lottery(0.3)",
        "Chen et al. 2020, The Lottery Ticket Hypothesis for Pre-trained BERT Networks, arXiv:2007.12223",
        "Train, prune the smallest tenth, go back to the pretrained weights, seven times; then train the 30 % kept.",
        unpublished("the paper's scores are at another density for every task"),
    ),
    Preset(
        "reweighted",
        "rpp + train(epochs=3) | finetune",
        "Guo et al. 2019, Reweighted Proximal Pruning, arXiv:1909.12486",
        "Shrink small weights to zero after each optimiser step, then train the rest.",
        unpublished("the paper prunes while pretraining, which this does not"),
    ),
    Preset(
        "deleted30",
        "delete_information(0.3) | finetune",
        "Gordon, Duh and Andrews 2020, Compressing BERT, arXiv:2002.08307",
        "A control: zero the smallest weights once and let them grow back, so that only what they had learned is lost.",
        unpublished("the paper deletes after further pretraining, which this does not"),
    ),
    Preset(
        "int8",
        "finetune | quantize(8)",
        "Zafrir et al. 2019, Q8BERT, arXiv:1910.06188, without its quantisation-aware training",
        "Fine-tune, then store every weight, embeddings included, as int8.",
        unpublished("published int8 scores are of quantisation-aware training, which this is not"),
    ),
    Preset(
        "half-int8",
        "half | quantize(8)",
        "the presets half and int8 combined",
        "Half the layers, distilled, then int8 weights.",
        unpublished("a combination of ours"),
    ),
    Preset(
        "bermo-magnitude",
        f"mix_layers | magnitude(0.1) + {SIX}",
        BERMO,
        "Read a mixture of all layers and gradually keep the largest 10 % of the encoder's weights.",
        published(
            f"Table 4 of {BERMO}",
            mnli={"accuracy": 74.2, "accuracy_mm": 75.19},
            qqp={"accuracy": 85.81, "f1": 80.97},
            squad={"f1": 70.93},
        ),
    ),
    Preset(
        "kd-pruned",
        f"{FROM_THE_START} | mix_layers + movement(0.1) + distill(alpha=0.9) + {SIX}",
        BERMO,
        "From the pretrained encoder, with a mixture of all its layers: keep the 10 % of the weights that move away "
        "from zero, while distilling the fine-tuned encoder; the head starts as the teacher's.",
        published(
            f"Table 5 of {BERMO}, whose QQP columns are swapped there",
            mnli={"accuracy": 76.82, "accuracy_mm": 77.31},
            qqp={"accuracy": 86.53, "f1": 81.86},
            squad={"f1": 76.85},
        ),
    ),
    Preset(
        "pruned10",
        _close(0.1, weight=10.0),
        CLOSE,
        "Our best recipe at 10 %: keep the weights that matter most to the loss, hold every layer's states close to "
        "those of the dense model, and store no zeros.",
        unpublished("a combination of ours; docs/pruning.md has it with ten seeds on SST-2"),
    ),
    Preset(
        "pruned3",
        _close(0.03, weight=100.0),
        CLOSE,
        "pruned10 at 3 %, with hidden states held closer still to the dense model's.",
        unpublished("a combination of ours; docs/pruning.md has it on SST-2"),
    ),
    Preset(
        "trimmed10",
        f"trim_vocabulary(size=7000) | {_close(0.1, weight=10.0)}",
        CLOSE,
        "pruned10 of a model with only the 7,000 most frequent word pieces of the training texts: once layers are "
        "pruned, most parameters left are word embeddings.",
        unpublished("a combination of ours"),
    ),
    Preset(
        "trimmed20",
        f"trim_vocabulary(size=7000) | {_close(0.2, weight=10.0)}",
        CLOSE,
        "trimmed10 with 20 % of the weights: a quarter of the parameters of most encoders.",
        unpublished("a combination of ours"),
    ),
    Preset(
        "trimmed3",
        f"trim_vocabulary(size=7000) | {_close(0.03, weight=100.0)}",
        CLOSE,
        "pruned3 with the same 7,000 word pieces.",
        unpublished("a combination of ours"),
    ),
]
