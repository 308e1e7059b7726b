"""Presets that learn from a teacher's layers."""

from smallbert.presets.preset import Preset, published, unpublished

SUN = "Sun et al. 2019, Patient Knowledge Distillation for BERT Model Compression, arXiv:1908.09355"
PATIENT = (
    "The student has the first {} pretrained layers and the fine-tuned teacher's head, and learns the labels, the "
    "teacher's scores and its first tokens' unit vectors at every {} layer but the last. The published run searches "
    "alpha, temperature and weight for each task, and divides KL by the number of classes, which this does not."
)
FROM_THE_START = "mark('pretrained') | finetune | rewind('pretrained')"

ROWS = [
    Preset(
        "distilbert-task",
        "finetune | drop_layers(0.5) | align('hidden', layers={-1: -1}, metric='cosine', weight=0.143) "
        "+ distill(alpha=0.714, temperature=2.0) + train(epochs=3)",
        "Sanh et al. 2019, DistilBERT, arXiv:1910.01108",
        "Half the layers of the fine-tuned encoder learn its scores, the labels and the direction of its last hidden "
        "states, weighted 5, 2 and 1; the published student learned on a large corpus first, with masked words for "
        "labels, and copied layers 1, 3, 5, 8, 10 and 12, where this takes every second one.",
        published(
            "huggingface/transformers-research-projects, distillation/README.md",
            mnli={"accuracy": 82.1},
            qqp={"accuracy": 88.5},
            sst2={"accuracy": 91.3},
        ),
    ),
    Preset(
        "pkd6",
        f"{FROM_THE_START} | drop_layers(6, which='first') | align('first', layers='skip', transform='l2', weight=100) "
        "+ distill(alpha=0.5, temperature=10.0) + train(epochs=4, lr=5e-5)",
        SUN,
        PATIENT.format("six", "second"),
        published(
            f"table of {SUN}",
            split="test",
            mnli={"accuracy": 81.5, "accuracy_mm": 81.0},
            sst2={"accuracy": 92.0},
            qqp={"f1": 70.7},
        ),
    ),
    Preset(
        "pkd3",
        f"{FROM_THE_START} | drop_layers(3, which='first') | align('first', layers='skip', transform='l2', weight=100) "
        "+ distill(alpha=0.5, temperature=10.0) + train(epochs=4, lr=5e-5)",
        SUN,
        PATIENT.format("three", "fourth") + " Its code takes the teacher's last layers instead.",
        published(
            f"table of {SUN}",
            split="test",
            mnli={"accuracy": 76.7, "accuracy_mm": 76.3},
            sst2={"accuracy": 87.5},
            qqp={"f1": 68.1},
        ),
    ),
    Preset(
        "aguilar-sid",
        "finetune | mark('teacher') | drop_layers(0.5) | align('attention', metric='kl', schedule='stacked', "
        "teacher='teacher', task=0.0) + align('first', metric='cosine', schedule='stacked', teacher='teacher') "
        "+ train(epochs=3) | distill(teacher='teacher') + train(epochs=3)",
        "Aguilar et al. 2020, Knowledge Distillation from Internal Representations, arXiv:1910.03723",
        "Half the layers first learn the teacher's attention and first tokens, one more layer after each equal share "
        "of the phase, then its scores and the labels. The published run moves on to the next layer by a threshold "
        "of the loss or a limit of epochs.",
        unpublished("only a mean over tasks, 93 % of BERT on CoLA, MRPC, QQP and RTE, could be found"),
    ),
    Preset(
        "tinybert6",
        "finetune | mark('teacher') | drop_layers(0.5) | align('hidden', transform='linear', weight=6, "
        "teacher='teacher', task=0.0) + align('embeddings', transform='linear', teacher='teacher') "
        "+ align('scores', weight=6, teacher='teacher') + train(epochs=10, lr=5e-5, warmup=0.0) "
        "| distill(teacher='teacher', alpha=1.0, temperature=1.0, metric='ce') + train(epochs=3, lr=3e-5)",
        "Jiao et al. 2020, TinyBERT, arXiv:1909.10351",
        "Half the layers learn the teacher's embedding output, hidden states and attention scores, then its answers. "
        "The published student learned on a corpus first, uses augmented data and one map for embeddings and layers; "
        "this one starts from the teacher's own layers and counts no padding.",
        published("table of Jiao et al. 2020, arXiv:1909.10351", split="test", sst2={"accuracy": 93.1}),
    ),
    Preset(
        "minilm-half",
        "finetune | mark('teacher') | drop_layers(0.5) | align('attention', layers={-1: -1}, metric='kl', "
        "teacher='teacher', task=0.0) + align('relations', of='v', layers={-1: -1}, metric='kl', teacher='teacher') "
        "+ train(epochs=3) | distill(teacher='teacher') + train(epochs=3)",
        "Wang et al. 2020, MiniLM, arXiv:2002.10957",
        "Half the layers learn the last layer's attention and value relations, then scores and labels; the published "
        "students are narrower and learn on a large corpus, without a task.",
        unpublished("published students of this method are narrower and have another teacher"),
    ),
    Preset(
        "minilmv2-half",
        "finetune | mark('teacher') | drop_layers(0.5) | align('relations', layers={-1: -1}, metric='kl', "
        "teacher='teacher', task=0.0) + train(epochs=3) | distill(teacher='teacher') + train(epochs=3)",
        "Wang et al. 2021, MiniLMv2, arXiv:2012.15828",
        "Half the layers learn how queries, keys and values of the last layer relate to each other, then scores and "
        "labels; the published student learns on a large corpus, without a task, in 48 parts where this takes as "
        "many as there are attention heads.",
        published("microsoft/unilm, minilm/README.md", mnli={"accuracy": 84.2}),
    ),
    Preset(
        "textbrewer",
        "finetune | drop_layers(0.5) | align('embeddings') + align('hidden', weight=6) + align('gram', weight=6) "
        "+ distill(alpha=1.0, temperature=8.0) + train(epochs=30, lr=1e-4)",
        "Yang et al. 2020, TextBrewer, arXiv:2002.12620",
        "Half the layers learn the teacher's hidden states, how tokens relate in them, and its scores, for long. The "
        "published run takes the relations of the embedding output too.",
        published(
            "airaria/TextBrewer, README.md, student T6",
            model="bert-base-cased",
            mnli={"accuracy": 83.5, "accuracy_mm": 84.0},
            squad={"em": 80.8, "f1": 88.1},
        ),
    ),
]
