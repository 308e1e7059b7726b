"""Presets whose students are of another make: bottlenecks, a small vocabulary, a stride, an LSTM.

Where a paper's student reads a large corpus first, docs/distillation.md shows where that stage goes.
"""

from typing import Any

from smallbert.presets.distillation import NEAREST, TEACHER
from smallbert.presets.preset import Preset, published, unpublished

ZHAO = "Zhao et al. 2019, Extreme Language Model Compression with Optimal Subwords and Shared Projections"
PRIMER = "Table 1 of Rogers et al. 2020, A Primer in BERTology, arXiv:2002.12327"


TANG = "Tang et al. 2019, Distilling Task-Specific Knowledge from BERT into Simple Neural Networks, arXiv:1903.12136"


def _lstm(settings: str) -> str:
    """A teacher, an LSTM, and the lesson of Tang et al."""
    return (
        f"finetune | lstm{settings} | augment(copies=20, ways={{'mask': 0.1, 'grams': 0.25}}) "
        "+ distill(alpha=1.0, metric='mse') + train(epochs=30, lr=1e-3, batch=50)"
    )


def _zhao(width: int, about: str, **numbers: Any) -> Preset:
    return Preset(
        f"zhao{width}",
        "add_vocabulary(4928) | pretrain(mixed=0.5, lr=5e-5) | finetune "
        f"| student(12, width={width}, ffn={4 * width}, start='slice') | small_vocabulary(4928) "
        "| share_projections(words=True) + distill(alpha=0.9) + train(epochs=10, lr=2e-4)",
        f"{ZHAO}, arXiv:1909.11687",
        f"Twelve layers {width} wide and a vocabulary of 4,928 pieces, with weights and word embeddings pulled towards "
        f"the teacher's, projected down by matrices that all layers share; {about} As published, the teacher predicts "
        "masked words while half of all words are split by a second, small vocabulary, the only one of the student. "
        "The published teacher and student learn this together, on a large corpus; the student starts from random "
        "weights and is then fine-tuned without a teacher. Ours learn one after the other: first the teacher, for an "
        "epoch of the task's own texts; then the student, cut out of the fine-tuned teacher, which is not changed and "
        "whose predictions are learned too.",
        published(f"Table 3 of {ZHAO}", split="test", **numbers),
    )


ROWS = [
    Preset(
        "mobilebert",
        f"{TEACHER} | bottleneck "
        "| align('hidden', transform='linear_each', schedule='progressive', weight=100, teacher='teacher', task=0.0) "
        "+ align('relations', of='qk', heads=4, metric='kl', schedule='progressive', teacher='teacher') "
        "+ train(epochs=10, lr=3e-4, dropout=0.0) "
        "| distill(teacher='teacher', alpha=0.5, temperature=1.0) + train(epochs=10, lr=1e-4)",
        "Sun et al. 2020, MobileBERT, arXiv:2004.02984",
        "24 thin layers between bottlenecks learn from the teacher's layers, one after the other, then its predictions "
        "and the labels in equal parts. The published teacher has the same depth and the same width between layers, so "
        "hidden states, their means and variances, and attention are compared directly; ours may be any model, so each "
        "layer has its own linear map to the teacher's, and relations of queries and of keys replace attention. Theirs "
        "learns on a large corpus, with other learning rates for layers before and after their turn. "
        "student(model='google/mobilebert-uncased') takes the published student.",
        published(
            "Table 3 of the paper as submitted",
            model="IB-BERT",
            split="test",
            sst2={"accuracy": 92.8},
            mnli={"accuracy": 83.3, "accuracy_mm": 82.6},
            qnli={"accuracy": 90.6},
            rte={"accuracy": 66.2},
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
        "waldorf",
        f"{TEACHER} | student(8, ffn=1024, start='slice') | stride(2) "
        "| augment(copies=2, ways='nearest', model='teacher') + align('hidden', teacher='teacher') "
        "+ distill(teacher='teacher') + train(epochs=6, lr=5e-5)",
        "Tian et al. 2019, WaLDORf, arXiv:1912.06638",
        "Eight thinner layers over a sequence half as long, made by a strided convolution and spread over all tokens "
        "again, learn the teacher's hidden states, its scores and the labels, on each text and two changed copies of "
        "it. The published teacher is ALBERT-xxlarge, and attention is aligned too; here it cannot be, since the "
        f"layers read joined tokens. {NEAREST}",
        unpublished(f"only relative values are known: 4.4 times smaller, 93 % of the teacher on SQuAD, by {PRIMER}"),
    ),
    Preset(
        "minibert",
        f"{TEACHER} | student(3, width=256, start='slice') "
        "| unlabelled + distill(teacher='teacher', alpha=1.0, temperature=1.0, metric='ce') "
        "+ train(epochs=10, lr=1e-4)",
        "Tsai et al. 2019, Small and Practical BERT Models for Sequence Labeling, arXiv:1909.00100",
        "Three layers 256 wide for tagging learn the teacher's predictions for first pieces of words, without labels. "
        "The published student is pretrained, and sees more texts without labels, in 48 languages; "
        "unlabelled('more.txt') adds texts here.",
        unpublished(f"only relative values are known: 6 times smaller, 98 % of the teacher, by {PRIMER}"),
    ),
    Preset(
        "bilstm",
        _lstm(""),
        TANG,
        "A one-layer bidirectional LSTM learns the teacher's scores by mean squared error, on each text and twenty "
        "changed copies of it: some words masked, or one to five words in a row kept. Pairs of texts are read one by "
        "one. The published run uses Adadelta and word2vec embeddings, and also replaces words by others of the same "
        "part of speech; ours does not.",
        unpublished(f"the paper's table could not be checked; 110 times smaller, 91 % of the teacher, by {PRIMER}"),
    ),
    Preset(
        "bilstm-trimmed",
        f"trim_vocabulary(size=7000) | {_lstm('(embed=128)')}",
        TANG,
        "bilstm with only the 7,000 most frequent word pieces of the training texts, in the teacher too, and their "
        "embeddings reduced to 128 dimensions, since nearly all parameters of bilstm are word embeddings. About 25 "
        "times fewer parameters than a BERT 384 wide, 80 times fewer than BERT-base.",
        unpublished("a combination of ours"),
    ),
    Preset(
        "bilstm-tiny",
        f"trim_vocabulary(size=5000) | {_lstm('(width=100, inner=100, embed=80)')}",
        TANG,
        "bilstm-trimmed with 5,000 pieces of 80 dimensions and an LSTM 100 wide: about 60 and 190 times fewer.",
        unpublished("a combination of ours"),
    ),
]
