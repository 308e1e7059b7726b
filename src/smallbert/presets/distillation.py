"""Presets whose students are the teacher's own layers, fewer or narrower, and learn from what its layers do.

Where a paper's student reads a large corpus first, docs/distillation.md shows where that stage goes.
"""

from typing import Any

from smallbert.presets.preset import Preset, published, unpublished

TEACHER = "finetune | mark('teacher')"
FROM_THE_START = "mark('pretrained') | finetune | rewind('pretrained')"  # the last trained one teaches
COPIES = "augment(copies=10, ways='nearest', model='teacher')"
ANSWERS = "distill(teacher='teacher', alpha=1.0, temperature=1.0, metric='ce')"
NEAREST = "Words are replaced by the nearest ones; write ways='masked' if the model file has a masked-LM head."

SUN = "Sun et al. 2019, Patient Knowledge Distillation for BERT Model Compression, arXiv:1908.09355"
JIAO = "Jiao et al. 2020, TinyBERT, arXiv:1909.10351"


def _pkd(layers: int, which: str, more: str = "", **numbers: Any) -> Preset:
    return Preset(
        f"pkd{layers}",
        f"{FROM_THE_START} | drop_layers({layers}, which='first') "
        "| align('first', layers='skip', transform='l2', weight=100) "
        "+ distill(alpha=0.5, temperature=10.0) + train(epochs=4, lr=5e-5)",
        SUN,
        f"The student has the first {'six' if layers == 6 else 'three'} pretrained layers and the fine-tuned teacher's "
        "head. It learns the labels, the teacher's scores and the direction of its first tokens' states at every "
        f"{which} layer but the last. The published run searches alpha, temperature and weight for each task, and "
        f"divides KL by the number of classes; this one does neither.{more}",
        published(f"table of {SUN}", split="test", **numbers),
    )


def _tinybert(layers: int, student: str, about: str, **numbers: Any) -> Preset:
    """Everything inside, then answers; weights are such that layers are summed up."""
    return Preset(
        f"tinybert{layers}",
        f"{TEACHER} | {student} | {COPIES} "
        f"+ align('hidden', layers='whole', transform='linear', weight={layers + 1}, teacher='teacher', task=0.0) "
        f"+ align('scores', weight={layers}, teacher='teacher') + train(epochs=10, lr=5e-5, warmup=0.0) "
        f"| {COPIES} + {ANSWERS} + train(epochs=3, lr=3e-5)",
        JIAO,
        f"{about} learn the teacher's embedding output, hidden states and attention scores, then its predictions, on "
        "each text and ten changed copies of it. The published student starts from random weights, is first trained on "
        "a large corpus and counts padding in its losses; this one is cut out of the fine-tuned teacher and counts no "
        f"padding, and its learning rate decays where theirs is constant while layers are taught. {NEAREST}",
        published("README of the code of arXiv:1909.10351", split="test", **numbers),
    )


def _relations(name: str, student: str, terms: str, reference: str, about: str, numbers: dict[str, Any]) -> Preset:
    """Relations of the last layer, then scores and labels."""
    return Preset(
        name,
        f"{TEACHER} | {student} | {terms} + train(epochs=5, lr=1e-4) "
        "| distill(teacher='teacher') + train(epochs=3, lr=5e-5)",
        reference,
        f"Six layers 384 wide, cut out of the teacher, learn {about} then scores and labels. The published student "
        "learns on a large corpus, from a pretrained teacher, and is fine-tuned without a teacher.",
        numbers,
    )


ROWS = [
    Preset(
        "distilbert",
        "finetune | drop_layers(0.5, which='spread') | align('hidden', layers={-1: -1}, metric='cosine', weight=0.143) "
        "+ distill(alpha=0.714, temperature=2.0) + train(epochs=3)",
        "Sanh et al. 2019, DistilBERT, arXiv:1910.01108",
        "Half the layers of the fine-tuned encoder, the first and the last among them, learn its scores, the labels "
        "and the direction of its last hidden states, weighted 5, 2 and 1. The published student learned this on a "
        "large corpus, with masked words as labels, and has no token types and no pooler.",
        published(
            "huggingface/transformers-research-projects, distillation/README.md",
            mnli={"accuracy": 82.1},
            qqp={"accuracy": 88.5},
            sst2={"accuracy": 91.3},
            qnli={"accuracy": 89.2},
            cola={"mcc": 51.3},
            rte={"accuracy": 59.9},
            squad={"f1": 86.9},
        ),
    ),
    _pkd(
        6,
        "second",
        mnli={"accuracy": 81.5, "accuracy_mm": 81.0},
        sst2={"accuracy": 92.0},
        qqp={"f1": 70.7},
    ),
    _pkd(
        3,
        "fourth",
        " Its code takes the teacher's last layers instead.",
        mnli={"accuracy": 76.7, "accuracy_mm": 76.3},
        sst2={"accuracy": 87.5},
        qqp={"f1": 68.1},
    ),
    Preset(
        "pd",
        f"{FROM_THE_START} | student(6, which='first') "
        "| unlabelled + distill(alpha=1.0, temperature=1.0, metric='ce') + train(epochs=4, lr=1e-4)",
        "Turc et al. 2019, Well-Read Students Learn Better, arXiv:1908.08962",
        "A small pretrained model learns the teacher's predictions on texts without labels, and nothing else. The "
        "published student is pretrained by itself and sees many more texts; ours starts as the first six pretrained "
        "layers and sees the task's own. unlabelled('more.txt') adds texts, "
        "student(model='google/bert_uncased_L-6_H-768_A-12') takes the published student, and | finetune at the end is "
        "the paper's optional last step.",
        published(
            "table of arXiv:1908.08962 for 6 layers of 768",
            sst2={"accuracy": 91.1},
            mrpc={"f1": 89.4, "accuracy": 84.9},
            qqp={"f1": 87.4, "accuracy": 90.7},
            mnli={"accuracy": 82.5, "accuracy_mm": 83.4},
            qnli={"accuracy": 89.4},
            rte={"accuracy": 66.7},
        ),
    ),
    Preset(
        "aguilar-sid",
        f"{TEACHER} | drop_layers(0.5) | align('attention', metric='kl', schedule='stacked', teacher='teacher', "
        "task=0.0) + align('first', metric='cosine', schedule='stacked', teacher='teacher') "
        "+ train(epochs=3) | distill(teacher='teacher') + train(epochs=3)",
        "Aguilar et al. 2020, Knowledge Distillation from Internal Representations, arXiv:1910.03723",
        "Half the layers first learn the teacher's attention and first tokens, one more layer after each equal share "
        "of the phase, then its scores and the labels. The published run adds the next layer once the loss is below "
        "a threshold, or after a number of epochs.",
        unpublished("only a mean over tasks, 93 % of BERT on CoLA, MRPC, QQP and RTE, could be found"),
    ),
    _tinybert(
        4,
        "student(4, width=312, heads=12, ffn=1200, start='slice')",
        "Four layers 312 wide",
        sst2={"accuracy": 92.6},
        cola={"mcc": 44.1},
        mrpc={"f1": 86.4},
        rte={"accuracy": 66.6},
    ),
    _tinybert(6, "student(6)", "Six layers of full width", sst2={"accuracy": 93.1}),
    _relations(
        "minilm",
        "student(6, width=384, heads=12, start='slice')",
        "align('attention', layers={-1: -1}, metric='kl', teacher='teacher', task=0.0) "
        "+ align('relations', of='v', layers={-1: -1}, metric='kl', teacher='teacher')",
        "Wang et al. 2020, MiniLM, arXiv:2002.10957",
        "the attention and the value relations of its last layer,",
        published(
            "microsoft/unilm, minilm/README.md, 6 layers of 384",
            model="UniLMv2",
            mnli={"accuracy": 83.3},
            sst2={"accuracy": 91.5},
            qqp={"accuracy": 90.6},
        ),
    ),
    _relations(
        "minilmv2",
        "student(6, width=384, start='slice')",
        "align('relations', heads=48, layers={-1: -1}, metric='kl', teacher='teacher', task=0.0)",
        "Wang et al. 2021, MiniLMv2, arXiv:2012.15828",
        "the relations of queries, of keys and of values in its last layer, in 48 parts,",
        published("microsoft/unilm, minilm/README.md, 6 layers of 384", mnli={"accuracy": 82.8}),
    ),
    Preset(
        "textbrewer",
        "finetune | drop_layers(0.5) | align('hidden', layers='whole', weight=7) "
        "+ align('gram', layers='whole', weight=7) + distill(alpha=1.0, temperature=8.0) + train(epochs=30, lr=1e-4)",
        "Yang et al. 2020, TextBrewer, arXiv:2002.12620",
        "Half the layers learn the teacher's embedding output, hidden states, their Gram matrices, and its scores, in "
        "a long training. Ours start as every second layer of the fine-tuned teacher and do not count padding.",
        published(
            "airaria/TextBrewer, README.md, student T6",
            model="bert-base-cased",
            mnli={"accuracy": 83.5, "accuracy_mm": 84.0},
            squad={"em": 80.8, "f1": 88.1},
        ),
    ),
    Preset(
        "rosita",
        " | ".join(
            [
                TEACHER,
                *(
                    f"student({size}) | {COPIES} + align('hidden', teacher='teacher') + {ANSWERS} "
                    f"+ train(epochs={epochs}, lr=5e-5)"
                    for size, epochs in (
                        ("10", 0.5),
                        ("8", 0.5),
                        ("8, heads=6, ffn=1024, start='slice', by='loss'", 0.5),
                        ("8, heads=2, ffn=512, start='slice', by='loss'", 10.0),
                    )
                ),
            ]
        ),
        "Liu et al. 2021, ROSITA: Refined BERT cOmpreSsion with InTegrAted techniques",
        "First layers are removed, from twelve to ten to eight, then heads and inner neurons, down to two and 512: "
        "those without which the loss would rise least. After each cut the student learns the teacher's hidden states "
        "and predictions, also on changed copies of the texts. The published run prunes in many small steps and "
        "reduces word embeddings to 128 dimensions by a singular value decomposition; ours takes four steps and leaves "
        "word embeddings as they are. "
        f"{NEAREST}",
        unpublished("only a mean over tasks, 98.5 % of BERT and 7.5 times smaller, is known, and was not checked"),
    ),
]
