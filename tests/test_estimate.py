"""What a recipe would make of a model, known before anything is trained: what does not fit, and nothing that does."""

import shutil
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from toys import daily, is_same_state, run, small, snapshot, toy_task

from smallbert.errors import UserError
from smallbert.making import starting
from smallbert.making.compare import compare, read_entries
from smallbert.making.estimate import estimate, look_ahead, without_weights
from smallbert.measuring.card import MACHINERY_CHECK
from smallbert.measuring.evaluate import evaluate
from smallbert.measuring.shelf import load_cards
from smallbert.methods import METHODS
from smallbert.model.anatomy import linears
from smallbert.model.encoder import fingerprint
from smallbert.model.folders import save_folder
from smallbert.presets import PRESETS
from smallbert.recipes.recipe import Recipe
from smallbert.studies import study
from smallbert.studies.arms import read_arms
from smallbert.studies.runs import run_study
from smallbert.tasks.derived import cut_at

TASK = toy_task("pair", 16)
SHORT = "train(epochs=1, batch=8, lr=0.001)"
NARROW = "student(2, width=8, heads=2, start='slice')"
LATE = f"{SHORT} | drop_layers(9)"


@lru_cache
def made(recipe="head"):
    """A small encoder that something was done to."""
    return run(recipe, small(), TASK, judge=False).encoder


def look(recipe, encoder, task):
    """What is known of one recipe."""
    return look_ahead([Recipe(recipe)], encoder, task)[Recipe(recipe)]


@pytest.fixture
def trained(monkeypatch):
    """What was trained, by the names of its methods."""
    from smallbert.making import run

    seen, real = [], run.train
    names = lambda phase: " + ".join(method.name for method in phase.methods)  # noqa: E731
    monkeypatch.setattr(run, "train", lambda phase, *rest: seen.append(names(phase)) or real(phase, *rest))
    return seen


def zeros_of_another_tool():
    """A model with zeros that its history knows nothing of."""
    encoder = made().copy()
    with torch.no_grad():
        for _, module in linears(encoder.backbone):
            module.weight[:, ::2] = 0
    return encoder


def uneven():
    """A model with one matrix of small numbers."""
    encoder = made().copy()
    with torch.no_grad():
        next(linears(encoder.backbone))[1].weight.mul_(1e-3)
    return encoder


@pytest.mark.parametrize(
    ("start", "recipe", "phrase"),
    [
        ("head | prune(0.1) | sparse", f"{SHORT} | magnitude(0.1) + {SHORT} | sparse", "no weight to prune"),
        ("head | quantize", f"{SHORT} | prune(0.1)", "prune before quantize"),
        ("head", LATE, "the model has 2 layers"),
        ("head | quantize", f"{SHORT} | student(2, width=8, start='slice')", "out of plain weights"),
        ("head | quantize", f"{SHORT} | lstm(6, inner=5)", "in few bits already"),
        ("head", f"{SHORT} | bottleneck(2, 24, 8, 4, embed=17)", "word embeddings cannot have 17 dimensions"),
        ("head", f"{SHORT} | sparse", "prune first"),
        ("head", f"{SHORT} | codebook | sparse", "prune first"),
        ("head", f"{SHORT} | mix_layers | {SHORT} | mix_layers", "there can be only one"),
        (
            "head",
            f"{SHORT} | small_vocabulary(40, text='nowhere.txt')",
            "there is no file or folder .nowhere.txt.",
        ),
        ("head", f"{SHORT} | student(model='nowhere/at-all')", "nowhere/at-all"),
        # What a phase of so many steps, or beside those methods, cannot do.
        ("head", f"{SHORT} | rpp + {SHORT}", "rpp: the phase has 2 steps"),
        ("head", f"{SHORT} | smooth_movement + {SHORT}", "fewer than one window of 10"),
        ("head", f"{SHORT} | smooth_movement(window=3) + pretrain(steps=2)", "fewer than one window of 3"),
        ("head", f"{SHORT} | second_order + train(freeze='backbone')", "prunes weights by how they are trained"),
        ("head", f"{SHORT} | mix_layers(gradual=0.5)", "in the same phase"),
        ("head", f"{SHORT} | pool_layers(detach=True)", "in the same phase"),
        ("head", f"{SHORT} | ternary + quantize_aware + {SHORT}", "rounds the same weights"),
        ("head", f"{SHORT} | magnitude(0.5) + {SHORT} | binary + {SHORT}", "one bit has no zero"),
        ("head", f"{SHORT} | unlabelled + {SHORT}", "only a teacher can use"),
        ("head", f"{SHORT} | train(freeze='backbone', store='nowhere')", "holds no store"),
        # Marks and teachers.
        ("head", f"{SHORT} | rewind('here')", "nothing was marked 'here'"),
        ("head", f"mark('here') | drop_layers(1) + {SHORT} | rewind('here')", "has changed shape since 'here'"),
        ("head", f"{SHORT} | distill('nowhere/at-all') + {SHORT}", "nowhere/at-all"),
        ("head", f"{SHORT} | distill(length=8) + align + {SHORT}", "other tokens than the student"),
        ("head", f"{SHORT} | align(layers={{3: 3}}) + {SHORT}", "a student of 2 layers"),
        ("head", f"{SHORT} | align(tokens='first_piece') + {SHORT}", "a task that labels words"),
        ("head", f"{SHORT} | student(2, width=8, start='slice') | align + {SHORT}", "8 wide and the teacher's 16"),
        ("head", f"{SHORT} | lstm(6, inner=5) | align('attention') + {SHORT}", "'bilstm' has no layers to compare"),
        ("head", f"{SHORT} | lstm(6, inner=5) | share_projections + {SHORT}", "'bilstm' has none"),
        ("head", f"{SHORT} | stride(2) | align('attention') + {SHORT}", "with a stride"),
        ("head", f"{SHORT} | {NARROW} | align('attention') + {SHORT}", "2 heads and the teacher with 4"),
        ("head", f"{SHORT} | {NARROW} | align('relations', heads=3) + {SHORT}", "that 3 divides, and one is 8"),
        ("head", f"{SHORT} | small_vocabulary(40) | align + {SHORT}", "tokenises differently"),
        ("head", f"{SHORT} | distill + distill + {SHORT}", "distill is in one phase twice with the same settings"),
        ("head", f"{SHORT} | align + align + {SHORT}", "align is in one phase twice"),
        ("head", f"{SHORT} | share_projections + share_projections(2.0) + {SHORT}", "is in one phase twice"),
        # Texts and who finds words.
        ("head", f"{SHORT} | pretrain(mixed=0.5)", "need a second vocabulary"),
        ("head", f"{SHORT} | pretrain + distill", "the teacher has no masked-LM head"),
        ("head", f"{SHORT} | pretrain + unlabelled + distill", "both bring data"),
        ("head", f"{SHORT} | lstm(6, inner=5) | pretrain", "put pretrain before it"),
        ("head", f"{SHORT} | augment(ways='nearest', model='nowhere/at-all') + distill + {SHORT}", "nowhere/at-all"),
        ("head", f"{SHORT} | augment + distill + {SHORT}", "that finds words for augment has no masked-LM head"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_trained(start, recipe, phrase, trained):
    encoder = made(start)
    before = snapshot(encoder)
    with pytest.raises(UserError, match=phrase):
        run(recipe, encoder, TASK)
    assert trained == [] and snapshot(encoder) == before


@pytest.mark.parametrize("words", ["", "\n  \n\n"])
def test_a_text_without_words_is_refused_before_anything_is_trained(words, trained, tmp_path):
    file = tmp_path / "empty.txt"
    file.write_text(words)
    for recipe in (
        f"pretrain({str(file)!r})",
        f"small_vocabulary(40, text={str(file)!r})",
        f"unlabelled({str(file)!r}) + distill + {SHORT}",
        f"unlabelled({str(file)!r}, own='left out') + distill + {SHORT}",
    ):
        with pytest.raises(UserError, match=r"there is no text in .*empty\.txt"):
            run(f"{SHORT} | {recipe}", small(), TASK)
    assert trained == []


def test_what_is_no_text_is_refused_before_anything_is_trained(trained, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "bytes").write_bytes(bytes(range(256)) * 20)
    for name, said in (("empty", "has no file in it"), ("bytes", "is not plain text in UTF-8")):
        with pytest.raises(UserError, match=said):
            run(f"{SHORT} | pretrain({str(tmp_path / name)!r})", small(), TASK)
    assert trained == []


def test_a_teacher_of_spans_reads_what_its_student_reads(trained):
    task = toy_task("answer", 16)
    for recipe in ("student(1) | small_vocabulary(60) | distill", "distill(length=16)"):
        with pytest.raises(UserError, match="not spans"):
            run(f"{SHORT} | {recipe} + {SHORT}", small(), task)
    assert trained == []


def test_a_folder_that_cannot_teach_says_so_before_anything_is_trained(trained, tmp_path):
    others = {"bare": small(), "two": run("head", small(), toy_task("classify")).encoder, "number": None}
    others["number"] = run("head", small(), toy_task("regress")).encoder
    others["deep"] = run("head", small(layers=3, hidden_size=24), TASK).encoder
    for name, encoder in others.items():
        save_folder(encoder, tmp_path / name)
    for recipe, phrase in {
        "distill(teacher={bare!r})": "has no head for a task; take one that was trained on this task",
        "distill(teacher={two!r})": "head is for classify with 2 classes, the student's for classify with 3 classes",
        "distill(teacher={number!r})": "head is for regress, the student's for classify with 3 classes",
        "align(teacher={deep!r})": "are 16 wide and the teacher's 24",
        "align('moments', layers={{1: 4}}, teacher={deep!r})": "a teacher of 3",
    }.items():
        text = recipe.format(**{name: str(tmp_path / name) for name in others})
        with pytest.raises(UserError, match=phrase):
            run(f"{SHORT} | {text} + {SHORT}", small(), TASK)
    assert trained == []


def test_another_checkpoint_may_learn_from_one_with_its_own_tokenizer(tmp_path):
    other = run("head", small("roberta"), TASK).encoder
    save_folder(other, tmp_path / "other")
    folder = str(tmp_path / "other")
    run(f"{SHORT} | student(model={folder!r}) | align(teacher={folder!r}) + {SHORT}", small(), TASK, judge=False)


@pytest.mark.parametrize(
    ("start", "recipe"),
    [
        # What will be zero can only be guessed, or comes with what is cut or taken.
        (zeros_of_another_tool, "train(freeze='backbone', epochs=1) | sparse"),
        (made, f"magnitude(0.3) + {SHORT} | student(2, width=8, start='slice') | sparse"),
        (made, f"{SHORT} | prune(0.2) | prune(0.99) | sparse"),
        (uneven, f"{SHORT} | prune(0.985) | sparse"),  # of all together: one matrix loses more
        # What the weights or the texts will say.
        (made, f"mix_layers + {SHORT} | cut_to_mixture(0.5) | {SHORT}"),
        (made, f"mix_layers + {SHORT} | cut_to_mixture(weigh='variation')"),
        (made, f"{SHORT} | small_vocabulary(40) + {SHORT} | lstm(6, inner=5)"),
        # Heads that the recipe or the task asks for.
        (small, f"{SHORT} | pool_layers(tokens='first') + {SHORT}"),
        (small, f"head('mean') | {SHORT} | magnitude(0.5, what='layers+pooler') + {SHORT}"),
        # Marks, teachers and steps as they will be.
        (made, f"mark('here') + {SHORT} | distill('here') + rpp(steps=1) + {SHORT} | rewind('here')"),
        (made, f"{SHORT} | add_vocabulary(60) | pretrain(mixed=0.5, steps=1) | small_vocabulary | {SHORT}"),
        (made, f"{SHORT} | small_vocabulary(40) | mark('a') | align(teacher='a') + {SHORT}"),
        (made, f"mark('a') | {SHORT} | add_vocabulary(50) | align(teacher='a') + {SHORT} | small_vocabulary(60)"),
        (made, f"{SHORT} | small_vocabulary(60) | small_vocabulary(40) | {SHORT}"),
        (made, f"pretrain(keep_head=True, steps=1) | {SHORT} | augment(copies=1) + distill + {SHORT}"),
        (made, f"{SHORT} | {NARROW} | align('relations', heads=2) + {SHORT}"),
        (made, f"{SHORT} | lstm(6, inner=5) | align(layers={{-1: -1}}, transform='linear') + distill + {SHORT}"),
        (made, f"{SHORT} | augment(copies=4, ways='nearest') + distill + smooth_movement(window=6) + {SHORT}"),
    ],
)
def test_what_runs_is_not_refused(start, recipe):
    run(recipe, start(), TASK, judge=False)


def test_a_matrix_that_was_pruned_while_another_is_stored_may_still_be_stored():
    """The rest of the model may have been pruned by a method whose share nobody knows."""
    half = made("head | prune(0.3)").copy()
    with torch.no_grad():
        half.backbone.encoder.layer[1].output.dense.weight.fill_(1.0)
    stored = run("sparse", half, TASK, judge=False).encoder
    assert look(f"l0 + {SHORT} | sparse", stored, TASK).refused is None
    assert "leave this sparse out" in str(look(f"{SHORT} | sparse", stored, TASK).refused)


def test_a_teacher_is_there_once_the_task_was_trained():
    taught = f"distill + {SHORT}"
    assert "needs a trained teacher" in str(look(f"pretrain(steps=1) | {taught}", small(), TASK).refused)
    assert look(f"{SHORT} | {taught}", small(), TASK).refused is None
    assert look(taught, made(), TASK).refused is None
    assert estimate(small(), taught)["fits"]  # which knows of no task


@pytest.mark.parametrize(("more", "layers"), [("", 2), (" | mark('middle')", 1)])
def test_no_student_teaches_itself_unasked(more, layers, tmp_path):
    """The fine-tuned model teaches all that comes behind it, also where a run goes on."""
    name = "latest" if not more else "middle"
    last = f"distill(teacher={name!r}) + {SHORT}"
    recipe = f"{SHORT} | drop_layers(1) | align('hidden') + {SHORT}{more} | mark('begin') + {last}"
    for _ in range(2):
        found = run(recipe, small(), TASK, judge=False, work=tmp_path).notes
        assert f"taught by {name!r}: {layers} layers 16 wide" in " ".join(found)
        shutil.rmtree(tmp_path / ("phase-5" if more else "phase-4"), ignore_errors=True)


def test_marks_of_a_phase_that_is_taken_over_are_known_by_name(tmp_path, trained):
    begun = f"mark('here') | {SHORT} | {SHORT}"
    run(begun, made(), TASK, work=tmp_path, judge=False)
    for label, refused in (("here", []), ("there", ["nothing was marked 'there'; marks so far: latest, here"])):
        count, said = len(trained), []
        try:
            run(f"{begun} | {SHORT} | rewind({label!r}) | {SHORT}", made(), TASK, work=tmp_path, judge=False)
        except UserError as error:
            said.append(str(error).removeprefix("rewind: "))
        assert said == refused and len(trained) == count + (0 if refused else 2)


@pytest.mark.parametrize("more", ["", ", masked=False"])
def test_a_pooler_that_will_not_read_whole_texts_is_told_before_and_after(more):
    short, task = f"pool_layers(length=9{more})", cut_at(TASK, 20)
    given = run(short, made(), task, judge=False).encoder
    told = ("texts may have 20 tokens, but the pooler reads only the first 9; see --length",)
    assert look(f"{SHORT} | {short} + {SHORT}", made(), task).warnings == told
    assert look(SHORT, given, task).warnings == told
    assert any("the pooler reads only the first 9 tokens" in note for note in evaluate(given, task)["notes"])
    for recipe, start, length in ((SHORT, given, 9), ("head", given, 20), ("pool_layers", made(), 20)):
        assert look(recipe, start, cut_at(TASK, length)).warnings == ()
        if length == 20:
            assert not any("pooler" in note for note in evaluate(run(recipe, start, task).encoder, task)["notes"])


def test_a_model_without_weights_has_shapes_only():
    encoder = made()
    before = snapshot(encoder)
    empty = without_weights(encoder)
    assert {tensor.device.type for tensor in (*empty.parameters(), *empty.buffers())} == {"meta"}
    assert empty.tokenizer is encoder.tokenizer and snapshot(encoder) == before
    assert [(name, one.shape, one.dtype) for name, one in empty.state_dict().items()] == [
        (name, one.shape, one.dtype) for name, one in encoder.state_dict().items()
    ]


def test_what_only_weights_can_tell_is_left_open():
    asked = estimate(made("head | mix_layers"), "cut_to_mixture")
    assert asked == {"fits": True, "why": None, "layers": None, "parameters": None, "weight_bytes": None}


# Many runs.


@pytest.mark.parametrize("start", daily([made, small], every=2))
def test_many_recipes_are_told_the_same_together_as_alone(start):
    """Also where one is the beginning of another, and where a mark or a teacher is behind what they share."""
    shared = f"{SHORT} | mark('a') | drop_layers(1)"
    texts = [preset.recipe for preset in PRESETS.values()]
    texts += ["", SHORT, shared, LATE, f"{LATE} | quantize", f"{shared} | rewind('a')", f"{shared} | rewind('b')"]
    texts += [f"{shared} | align('hidden', layers={{1: {n}}}) + {SHORT}" for n in (1, 2, 3)]
    texts += [f"{shared} | pool_layers(length=9) + {SHORT}", f"{shared} | distill + {SHORT} | drop_layers(2)"]
    texts += [f"{shared} | {step} | sparse" for step in ("quantize", "head", f"magnitude(0.1) + {SHORT}")]
    texts += [f"mix_layers + {SHORT} | cut_to_mixture | drop_layers({n})" for n in (1, 9)]
    recipes = [Recipe(text) for text in dict.fromkeys(texts)]
    task, given = cut_at(TASK, 20), start()
    together, before = look_ahead(recipes, given, task), snapshot(given)
    alone = {recipe: look(recipe, given, task) for recipe in recipes}
    as_text = lambda found: {str(recipe): (str(one.refused), one.warnings) for recipe, one in found.items()}  # noqa: E731
    assert as_text(together) == as_text(alone) and snapshot(given) == before
    assert 5 < sum(one.refused is None for one in alone.values()) < len(recipes) - 5
    assert sum(bool(one.warnings) for one in alone.values()) == 1


def test_what_recipes_begin_with_is_looked_at_once(monkeypatch):
    planned, real = [], METHODS["drop_layers"].plan
    monkeypatch.setattr(METHODS["drop_layers"], "plan", lambda self, *some: planned.append(1) or real(self, *some))
    said, texts = [], [f"{SHORT} | drop_layers(1) | {last}" for last in ("quantize", f"distill + {SHORT}", "sparse")]
    look_ahead(map(Recipe, texts), made(), TASK, lambda *what: said.append(what))
    assert len(planned) == 1
    assert said == [(f"checking recipes on {TASK.name}", done, 3, "") for done in range(4)]


def test_a_comparison_says_at_once_what_does_not_fit(tmp_path, monkeypatch):
    from smallbert.making import run

    monkeypatch.setattr("smallbert.making.compare.FIRST_LOOK", 0.01)
    real, cards = run.train, []
    monkeypatch.setattr(
        run, "train", lambda *some: cards.append(load_cards(tmp_path, (MACHINERY_CHECK,))) or real(*some)
    )
    start = starting.Start(small(), "small bert", fingerprint(small()))
    setting = {"kind": MACHINERY_CHECK, "seconds": 0.0, "seeds": (0, 1)}
    found = compare(read_entries(None, f"{SHORT}; {LATE}"), start, TASK, tmp_path, **setting)
    assert [(card["status"], card["why"]) for card in cards[0]] == [("failed", found[-1]["why"])] * 2
    assert len(cards) == 2 and "the model has 2 layers" in found[-1]["why"]  # each seed trains what fits, and no more
    assert [card["status"] for card in found] == ["ok", "failed"] * 2


@pytest.mark.parametrize("again", [False, True])
def test_a_study_says_at_once_what_does_not_fit(again, tmp_path, trained):
    arms, _ = read_arms(f"{SHORT}; {LATE}", "fits; does not")
    start = starting.Start(made(), "small bert", fingerprint(made()))
    asked = study.Study("", ("pair",), arms, (9, 25), tmp_path, kind=MACHINERY_CHECK, named=True)
    bench, told = study.Bench(start, {"pair": TASK}), []
    results = run_study(asked, bench, line=lambda text: told.append((text, len(trained))))
    assert [result.status for result in results] == ["ok", "ok", "failed", "failed"]
    assert trained == ["train"] * 2 and [count for _, count in told] == [0, 0, 1, 2]
    assert told[1][0].startswith("2 of 4: pair, seed 25, does not: failed, drop_layers(keep=9): the model has 2 layers")
    if again:
        assert run_study(replace(asked, again=True), bench) == results
        assert trained == ["train"] * 2


def test_a_study_looks_at_what_is_not_finished_and_at_it_once(tmp_path, monkeypatch):
    """The numbers of the model are counted once too, however many tasks there are."""
    from smallbert.making import estimate

    counted, real = [], estimate.linears
    monkeypatch.setattr(estimate, "linears", lambda one: counted.append(next(one.parameters()).is_meta) or real(one))
    tasks = {name: replace(cut_at(TASK, 20), name=name) for name in ("pair", "other")}
    bench = study.Bench(starting.Start(made(), "small bert", fingerprint(made())), tasks)

    def seen(*lengths):
        counted.clear()
        told, said = [], []
        arms, _ = read_arms("; ".join(f"pool_layers(length={n})" for n in lengths), "; ".join(map(str, lengths)))
        asked = study.Study("", tuple(tasks), arms, (9,), tmp_path, kind=MACHINERY_CHECK)
        run_study(asked, bench, say=lambda *what: said.append(what), line=told.append)
        looked = [what[:3] for what in said if what[0].startswith("checking")]
        return counted.count(False), looked, [line.split(":")[0] for line in told if "the pooler reads" in line]

    looked = [(f"checking recipes on {name}", done, 1) for name in tasks for done in (0, 1)]
    assert seen(9) == (1, looked, ["pair, 9", "other, 9"])
    assert seen(9, 8) == (1, looked, ["pair, 8", "other, 8"])
    assert seen(9, 8) == (0, [], [])


def test_a_study_knows_recipes_that_can_never_run_before_the_first_run(tmp_path, trained):
    """Whatever speaks against them: steps, marks, teachers, other methods, an LSTM, files."""
    never = [
        f"rpp + {SHORT}",
        f"{SHORT} | smooth_movement + {SHORT}",
        f"{SHORT} | rewind('here')",
        f"mark('here') | lstm(6, inner=5) + {SHORT} | rewind('here')",
        f"lstm(6, inner=5) | align('scores') + {SHORT}",
        f"student(2, width=8, start='slice') | align + {SHORT}",
        f"magnitude(0.5) + {SHORT} | binary + {SHORT}",
        f"unlabelled + {SHORT}",
        f"train(freeze='backbone', store={str(tmp_path / 'nowhere')!r})",
    ]
    arms, _ = read_arms("; ".join([SHORT, *never]))
    asked = study.Study("", ("pair",), arms, (9, 25), tmp_path / "out", kind=MACHINERY_CHECK)
    bench, told = study.Bench(starting.Start(made(), "small bert", fingerprint(made())), {"pair": TASK}), []
    results = run_study(asked, bench, line=lambda text: told.append(len(trained)))
    assert [result.status for result in results] == ["ok"] * 2 + ["failed"] * 2 * len(never)
    assert told == [0] * 2 * len(never) + [1, 2] and trained == ["train"] * 2


def test_a_finished_phase_is_taken_over_though_it_could_not_be_made_any_more(tmp_path, trained):
    """What it was made of may be gone; without it, the same recipe is refused before it trains."""
    save_folder(made(), tmp_path / "other")
    recipe = f"student(model={str(tmp_path / 'other')!r}) + {SHORT} | mix_layers + {SHORT} | quantize"
    whole = run(recipe, small(), TASK, work=tmp_path / "work", judge=False).encoder
    shutil.rmtree(tmp_path / "other")
    again = run(recipe, small(), TASK, work=tmp_path / "work", judge=False).encoder
    assert is_same_state(again, whole) and len(trained) == 2
    shutil.rmtree(tmp_path / "work" / "phase-2")
    assert is_same_state(run(recipe, small(), TASK, work=tmp_path / "work", judge=False).encoder, whole)
    assert len(trained) == 3
    longer = f"{recipe} | {SHORT} | drop_layers(9)"  # what is behind it is still looked at
    with pytest.raises(UserError, match="the model has 2 layers"):
        run(longer, small(), TASK, work=tmp_path / "work", judge=False)
    with pytest.raises(UserError, match="other"):
        run(recipe, small(), TASK, work=tmp_path / "elsewhere", judge=False)
    assert len(trained) == 3
