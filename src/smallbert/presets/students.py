"""Presets of distilled students, each as far as logits reach; where the paper aligns more, its row says what."""

from typing import Any

from smallbert.presets.preset import Preset, published, unpublished

# Terms that align(...) layers belong into the last phase of a row, beside distill, or into a phase of their own before
# it where the paper does one after the other, as TinyBERT and MobileBERT do.

ZHAO = "Zhao et al. 2019, Extreme Language Model Compression with Optimal Subwords and Shared Projections"
ZHAO_TABLE = f"Table 3 of {ZHAO}"
PRIMER = "Table 1 of Rogers et al. 2020, A Primer in BERTology, arXiv:2002.12327"


def _zhao(width: int, about: str, **numbers: Any) -> Preset:
    return Preset(
        f"zhao{width}",
        f"finetune | student(12, width={width}, ffn={4 * width}, start='slice') | small_vocabulary(4928) "
        "| share_projections + distill(alpha=0.9) + train(epochs=10, lr=2e-4)",
        f"{ZHAO}, arXiv:1909.11687",
        f"Twelve layers {width} wide and a vocabulary of 4,928 pieces, with weights pulled towards the teacher's, "
        f"projected; {about} The published student is pretrained on masked words beside its teacher, in a mixture of "
        "both vocabularies, and only then fine-tuned without a teacher; ours is cut out of the fine-tuned encoder and "
        "distilled on the task.",
        {**published(ZHAO_TABLE, **numbers), "model": f"BERT-{width}", "split": "test"},
    )


ROWS = [
    Preset(
        "pd",
        "finetune | student(6, which='first') | distill(alpha=1.0, temperature=1.0) + train(epochs=4, lr=1e-4)",
        "Turc et al. 2019, Well-Read Students Learn Better, arXiv:1908.08962",
        "Distil nothing but logits into a small model that has read before. The published student is pretrained on "
        "masked words itself and sees unlabelled text; ours begins as the first six layers and sees the task's texts. "
        "student(model='google/bert_uncased_L-6_H-768_A-12') in place of student(6) takes a published one.",
        published(
            "Table of arXiv:1908.08962 for 6 layers of 768",
            sst2={"accuracy": 91.1},
            mrpc={"f1": 89.4, "accuracy": 84.9},
            qqp={"f1": 87.4, "accuracy": 90.7},
            mnli={"accuracy": 82.5, "accuracy_mm": 83.4},
            qnli={"accuracy": 89.4},
            rte={"accuracy": 66.7},
        ),
    ),
    _zhao(
        192,
        "5.7 times fewer parameters than BERT-base.",
        mnli={"accuracy": 78.2, "accuracy_mm": 77.7},
        mrpc={"f1": 83.6, "accuracy": 76.9},
        sst2={"accuracy": 88.4},
    ),
    _zhao(
        96,
        "19 times fewer.",
        mnli={"accuracy": 76.5, "accuracy_mm": 75.2},
        mrpc={"f1": 83.7, "accuracy": 77.5},
        sst2={"accuracy": 85.6},
    ),
    _zhao(
        48,
        "62 times fewer.",
        mnli={"accuracy": 71.3, "accuracy_mm": 70.4},
        mrpc={"f1": 78.0, "accuracy": 68.2},
        sst2={"accuracy": 80.0},
    ),
    Preset(
        "tinybert4",
        "finetune | student(4, width=312, heads=12, ffn=1200, start='slice') "
        "| distill(alpha=1.0, temperature=1.0) + train(epochs=10, lr=5e-5)",
        "Jiao et al. 2020, TinyBERT, arXiv:1909.10351",
        "Four layers 312 wide. The published student is first distilled from the pretrained teacher on a large corpus, "
        "then on augmented task data, layer by layer before logits; ours is cut out of the fine-tuned encoder and "
        "learns its logits on the task's own data.",
        published(
            "README of the code of arXiv:1909.10351",
            model="TinyBERT",
            split="test",
            sst2={"accuracy": 92.6},
            cola={"mcc": 44.1},
            mrpc={"f1": 86.4},
            rte={"accuracy": 66.6},
        ),
    ),
    Preset(
        "mobilebert",
        "finetune | bottleneck | distill(alpha=0.9) + train(epochs=10, lr=1e-4)",
        "Sun et al. 2020, MobileBERT, arXiv:2004.02984",
        "24 thin layers between bottlenecks. The published student learns layer by layer from an equally deep teacher "
        "of its own kind, then masked words on a large corpus; ours has only the teacher's words and logits, so it is "
        "a control until it is pretrained. student(model='google/mobilebert-uncased') takes the published one.",
        published(
            "Table 3 of the paper as submitted",
            model="MobileBERT",
            split="test",
            sst2={"accuracy": 92.8},
            mnli={"accuracy": 83.3, "accuracy_mm": 82.6},
            qnli={"accuracy": 90.6},
            rte={"accuracy": 66.2},
        ),
    ),
    Preset(
        "waldorf",
        "finetune | student(8, ffn=1024, start='slice') | stride(2) | distill(alpha=0.9) + train(epochs=6, lr=5e-5)",
        "Tian et al. 2019, WaLDORf, arXiv:1912.06638",
        "Eight thinner layers over a sequence half as long, made by a strided convolution and spread over all tokens "
        "again for spans. The published teacher is ALBERT-xxlarge, hidden states and attention are aligned too, and "
        "data are augmented.",
        unpublished(f"only relative numbers are known: 4.4 times smaller, 93 % of the teacher on SQuAD, by {PRIMER}"),
    ),
    Preset(
        "minibert",
        "finetune | student(3, width=256, start='slice') | distill(alpha=1.0, temperature=1.0) "
        "+ train(epochs=10, lr=1e-4)",
        "Tsai et al. 2019, Small and Practical BERT Models for Sequence Labeling, arXiv:1909.00100",
        "Three layers 256 wide for tagging, taught on first pieces of words. The published student is pretrained and "
        "sees unlabelled text of 48 languages too.",
        unpublished(f"only relative numbers are known: 6 times smaller, 98 % of the teacher, by {PRIMER}"),
    ),
    Preset(
        "bilstm-soft",
        "finetune | bilstm | distill(alpha=1.0, temperature=8.0) + train(epochs=30, lr=1e-3, batch=50)",
        "Tang et al. 2019, Distilling Task-Specific Knowledge from BERT into Simple Neural Networks, arXiv:1903.12136",
        "A one-layer LSTM read from both ends; pairs of texts are read one by one. The published loss is the mean "
        "square of logits, which the divergence at a high temperature comes near; the published optimiser is Adadelta, "
        "words are word2vec's, and the data are augmented twentyfold, on which the result hangs.",
        unpublished("the paper's table could not be checked"),
    ),
]
