"""The recipe language: text and Python mean the same, a text survives its printing, every mistake is answered."""

import copy
import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import smallbert
from smallbert.errors import UserError
from smallbert.methods import METHODS, Method
from smallbert.presets import PRESETS
from smallbert.recipes.recipe import Phase, Recipe
from smallbert.recipes.registry import Registry, UnknownName


@pytest.fixture(autouse=True, scope="module")
def toys() -> Iterator[SimpleNamespace]:
    """Methods of the test's own, gone again afterwards so that no other test meets them."""
    with METHODS.for_now():

        class ToyShrink(Method):
            """Keep a few
            things.

            More is said here.
            """

            keep: int = 6
            which: Literal["even", "first"] = "even"

            def check(self) -> None:
                if self.keep == 13:
                    raise UserError("keep must not be 13")

        class ToyTeach(Method):
            """Learn from another."""

            stage = 10
            alpha: float = 0.9
            teacher: str | None = None

        class ToyOdd(Method):
            """Take settings of every kind."""

            stage = 30
            numbers: list[int] = field(default_factory=lambda: [1, 2])
            table: dict = field(default_factory=dict)
            share: int | float | bool = 0.5
            free: Any = None

        class ToyAgain(Method):
            """Do something several times."""

            times: int
            inner: Recipe

            def expand(self) -> Recipe:
                return Recipe([self.inner] * self.times)

        class ToyLoop(Method):
            """Stand for itself."""

            def expand(self) -> Recipe:
                return Recipe(self)

        class ToyTrain(Method):
            """Set how the phase trains."""

            is_train_setting = True
            stage = 0
            epochs: float = 3.0

        classes = (ToyShrink, ToyTeach, ToyOdd, ToyAgain, ToyLoop, ToyTrain)
        yield SimpleNamespace(**{cls.name: cls() if cls.is_ready() else cls for cls in classes})


def python(text: str, toys: SimpleNamespace) -> Recipe:
    """What the text means to Python, given the ready-made methods."""
    return Recipe(eval(text, {"__builtins__": {}, "identity": Recipe(), **vars(toys)}))


# Text and Python


@pytest.mark.parametrize(
    "text",
    [
        "toy_shrink",
        "toy_shrink(4)",
        "toy_shrink(keep=4, which='first') | toy_teach",
        "toy_shrink | toy_teach + toy_train(epochs=2) | toy_shrink(2)",
        "toy_shrink + toy_teach(1) | identity | toy_odd([-1, 2], {'a': [None, -0.5]}, share=True)",
        "(toy_shrink | toy_teach) | (toy_odd + (toy_teach + toy_train))",
        "toy_odd(free=toy_shrink | toy_teach) | toy_odd(free=[1, 'a'])",
        "toy_again(2, toy_shrink(3) + toy_train | toy_teach) | toy_again(times=1, inner=identity)",
        "identity",
        "identity + toy_shrink",
    ],
)
def test_text_and_python_mean_the_same(text: str, toys: SimpleNamespace) -> None:
    assert Recipe(text) == python(text, toys)
    assert Recipe(text).key() == str(python(text, toys))


def test_every_setting_is_printed_defaults_included() -> None:
    assert str(Recipe("toy_shrink(4) | toy_teach(1)")) == (
        "toy_shrink(keep=4, which='even') | toy_teach(alpha=1.0, teacher=None)"
    )


@pytest.mark.parametrize(
    ("text", "brief"),
    [
        ("toy_shrink(keep=4, which='even') | toy_teach(0.9)", "toy_shrink(4) | toy_teach"),
        ("toy_teach(teacher='a') + toy_train(epochs=2)", 'toy_teach(teacher="a") + toy_train(2.0)'),
        ("toy_teach(teacher='\\'')", 'toy_teach(teacher="\'")'),
        ("toy_again(2, toy_shrink(6) | toy_teach(1))", "toy_again(2, inner=toy_shrink | toy_teach(1.0))"),
        ("identity", "identity"),
    ],
)
def test_a_brief_recipe_leaves_out_what_goes_without_saying(text: str, brief: str) -> None:
    assert Recipe(text).brief() == brief


def test_where_copies_are_kept_is_no_part_of_the_work() -> None:
    here, there, other = (
        Recipe(f"finetune | augment(copies={copies}, folder={folder!r}) + distill + train")
        for copies, folder in ((2, "here"), (2, "there"), (3, "here"))
    )
    assert here != there and here.key() == there.key() != other.key()
    assert here.key() == str(Recipe("finetune | augment(copies=2) + distill + train"))
    inner = [Recipe(f"repeat(2, augment(folder={folder!r}) + distill + train)") for folder in ("here", "there")]
    assert inner[0].key() == inner[1].key()


def test_a_recipe_may_run_over_lines_and_hold_comments() -> None:
    text = "toy_shrink  # fewer\r\n  | toy_teach(\n  alpha=0.5)  # then learn\n"
    assert Recipe(text) == Recipe("toy_shrink | toy_teach(alpha=0.5)")


def test_text_joins_methods_on_either_side(toys: SimpleNamespace) -> None:
    assert "toy_shrink" | toys.toy_teach == Recipe("toy_shrink | toy_teach") == toys.toy_shrink | "toy_teach"
    assert "toy_shrink" + toys.toy_teach == toys.toy_shrink + "toy_teach"


@pytest.mark.parametrize("text", ["", "  \n", "identity", "identity | identity", "# nothing"])
def test_the_empty_recipe_is_the_identity(text: str) -> None:
    assert len(Recipe(text)) == 0
    assert str(Recipe(text)) == "identity"


def test_methods_of_a_phase_stand_in_the_order_of_their_stage(toys: SimpleNamespace) -> None:
    phase = toys.toy_train + toys.toy_odd + toys.toy_teach
    assert [method.name for method in phase] == ["toy_teach", "toy_odd", "toy_train"]
    assert phase == toys.toy_teach + toys.toy_train + toys.toy_odd
    assert phase.train_setting == toys.toy_train and phase.trains
    assert (toys.toy_teach + toys.toy_odd).train_setting is None and not (toys.toy_teach + toys.toy_odd).trains


def test_recipes_unpack_into_phases_and_methods(toys: SimpleNamespace) -> None:
    ((method,),) = Recipe("toy_shrink(3)")
    assert method == toys.toy_shrink(3) != toys.toy_shrink(4)
    first, second = Recipe("toy_shrink | toy_teach + toy_odd")
    assert (len(first), len(second)) == (1, 2)


def test_nothing_about_a_recipe_can_be_changed(toys: SimpleNamespace) -> None:
    recipe = toys.toy_shrink | toys.toy_teach
    with pytest.raises(AttributeError):
        recipe._parts = ()
    with pytest.raises(FrozenInstanceError):
        toys.toy_shrink.keep = 3
    assert len({recipe, copy.deepcopy(recipe), Recipe(str(recipe))}) == 1


def test_a_recipe_can_be_sent_to_another_process() -> None:
    recipe = Recipe("drop_layers(3) | repeat(2, distill + train(epochs=1))")
    assert pickle.loads(pickle.dumps(recipe)) == recipe


# Properties

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**62), 2**62)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
SETTINGS = {
    "toy_shrink": {"keep": st.integers(14, 2**62), "which": st.sampled_from(["even", "first"])},
    "toy_teach": {"alpha": st.floats(0, 1), "teacher": st.none() | st.text()},
    "toy_odd": {
        "numbers": st.lists(st.integers(-9, 9), max_size=3),
        "table": st.dictionaries(st.text(), JSON, max_size=3),
        "share": st.integers(0, 9) | st.floats(0, 1) | st.booleans(),
        "free": JSON,
    },
}


def methods() -> st.SearchStrategy[Method]:
    """Any method with any settings, looked up only when drawn, since the toys come with the fixture."""
    calls = [st.tuples(st.just(name), st.fixed_dictionaries(settings)) for name, settings in SETTINGS.items()]
    return st.one_of(calls).map(lambda call: METHODS[call[0]](**call[1]))


def recipes() -> st.SearchStrategy[Recipe]:
    """Any recipe, some with recipes among their settings."""
    plain = st.lists(st.lists(methods(), min_size=1, max_size=3).map(Phase), max_size=3).map(Recipe)
    return st.recursive(
        plain,
        lambda inner: st.tuples(st.integers(0, 3), inner, plain).map(
            lambda drawn: METHODS["toy_again"](drawn[0], drawn[1]) | drawn[2]
        ),
        max_leaves=3,
    )


@settings(deadline=None, max_examples=100)
@given(recipe=recipes())
def test_a_recipe_survives_its_own_printing(recipe: Recipe, toys: SimpleNamespace) -> None:
    again = Recipe(str(recipe))
    assert str(again) == str(recipe) == again.key()
    assert again == recipe == python(str(recipe), toys) == Recipe(recipe.brief())


PIECES = (
    "toy_shrink toy_teach toy_again bermo identity maybe keep = ( ) [ ] { } | + - , : * ** 3 0.5 1e999 None # é".split()
)
PIECES += ["'a'", "b'a'", "'\\d'", " ", "\n", "\r", "\t"]
PIECES += ["\0", "\x0c", "\u2028", "\ud800", "lambda", "if", ".", ":=", "f'{1}'", "0x" + "f" * 4000]


@settings(deadline=None, max_examples=300)
@given(text=st.lists(st.sampled_from(PIECES), max_size=12).map("".join) | st.text())
def test_any_text_is_a_recipe_or_a_user_error(text: str) -> None:
    try:
        recipe = Recipe(text)
    except UserError as error:
        assert str(error)
    else:
        assert Recipe(str(recipe)) == recipe


# Errors


@pytest.mark.parametrize(
    ("text", "says", "under"),
    [
        (
            "toy_teach | toy_shrnk(6)",
            "no method or preset is called 'toy_shrnk'. Did you mean 'toy_shrink'?",
            "toy_shrnk",
        ),
        ("berno | toy_teach", "Did you mean 'bermo'?", "berno"),
        ("toy_shrink(kep=3)", "no setting 'kep'. Did you mean 'keep'? Its settings are: keep=6, which='even'", None),
        ("toy_shrink('six')", "toy_shrink: keep must be int, but 'six' (str) was given", None),
        ("toy_shrink(6.0)", "keep must be int, but 6.0 (float) was given", None),
        ("toy_shrink(True)", "keep must be int, but True (bool) was given", None),
        ("toy_shrink(which='evn')", "must be 'even' or 'first', but 'evn' (str) was given. Did you mean 'even'?", None),
        ("align(layers='unifrom')", "(str) was given. Did you mean 'uniform'?", None),
        ("toy_shrink(which=first)", "If it is text, write it in quotes: 'first'", "first"),
        ("toy_teach | toy_shrink(13)", "keep must not be 13", "toy_shrink(13)"),
        ("toy_teach(alpha=None)", "alpha must be float, but None (NoneType) was given", None),
        ("toy_teach(alpha=1e999)", "alpha must be a finite number, but inf (float) was given", None),
        ("toy_teach(teacher=3)", "teacher must be str or None, but 3 (int) was given", None),
        ("toy_teach(teacher=toy_shrink)", "teacher must be str or None", None),
        ("toy_odd(numbers=['a'])", "numbers must be list of int, but ['a'] (list) was given", None),
        ("toy_odd(table={1.5: 2})", "a setting is a number, a text in quotes", "{1.5: 2}"),
        ("toy_odd(share='x')", "share must be int, float or bool, but 'x' (str) was given", None),
        ("toy_again(2)", "toy_again needs 'inner'; its settings are: times, inner", None),
        ("toy_again(2, 3)", "inner must be a recipe, but 3 (int) was given", None),
        ("toy_shrink(1, 'even', 3)", "was given 3 settings, but its settings are: keep=6, which='even'", None),
        ("toy_shrink(1, keep=2)", "'keep' twice", None),
        ("toy_shrink(keep=1, keep=2)", "'keep' is given twice", "keep=2"),
        ("toy_shrink(**x)", "** cannot be used", "**x"),
        ("toy_shrink(1/3)", "a setting is a number", "1/3"),
        ("toy_shrink(open('x'))", "no method or preset is called 'open'", "open"),
        ("toy_shrink(-True)", "a setting is a number", "-True"),
        ("toy_shrink({3, 4})", "`smallbert compare`, which tries each", "{3, 4}"),
        ("toy_teach | maybe(toy_shrink)", "`smallbert compare`, which tries each", "maybe(toy_shrink)"),
        ("toy_train + toy_teach + toy_train", "one training setting, but toy_train(epochs=3.0) and", None),
        ("(toy_shrink | toy_teach) + toy_odd", "+ joins methods of one phase", "toy_shrink | toy_teach"),
        ("toy_shrink - toy_teach", "a name is written with _", None),
        ("toy_shrink, toy_teach", "a comma cannot join methods; write | (then) or + (together)", "toy_teach"),
        ("toy_shrink toy_teach", "cannot read this recipe (invalid syntax); a recipe is methods joined by", None),
        (r"toy_teach(teacher='C:\models')", r"invalid escape sequence '\m'", None),
        ("bermo(3)", "bermo has no settings", None),
        ("identity(1)", "identity has no settings", None),
        ("3", "this is not a method", "3"),
        ("toy_shrink.keep", "this is not a method", None),
        ("toy_odd | é | toy_shrnk", "no method or preset is called 'é'", "é"),
    ],
)
def test_a_mistake_is_answered_with_the_place_and_the_way_out(text: str, says: str, under: str | None) -> None:
    with pytest.raises(UserError) as caught:
        Recipe(text)
    what, shown, carets = str(caught.value).split("\n")
    assert says in what
    assert shown == "  " + text
    start = carets.index("^")
    pointed = shown[start : start + carets.count("^")]
    assert pointed == (under or pointed)
    assert set(carets[start:]) == {"^"}


def test_the_caret_stands_in_the_line_of_the_mistake() -> None:
    with pytest.raises(UserError) as caught:
        Recipe("toy_teach |\n  toy_teach(teacher='é') | toy_shrnk |\n  toy_odd")
    assert str(caught.value).endswith("\n    toy_teach(teacher='é') | toy_shrnk |\n" + " " * 29 + "^^^^^^^^^")


@pytest.mark.parametrize("text", ["toy_shrink(", "toy_shrink)", "toy_shrink |", "toy_a) | (b", "toy_a)(b", "'", "("])
def test_an_unfinished_text_is_answered(text: str) -> None:
    with pytest.raises(UserError, match=r"cannot read this recipe.*a recipe is methods joined by"):
        Recipe(text)


@pytest.mark.parametrize("text", ["toy_shrink | " * 20_000 + "toy_shrink", "-" * 20_000 + "1", "toy_shrink\0"])
def test_a_monstrous_text_is_answered(text: str) -> None:
    with pytest.raises(UserError, match="recipe"):
        Recipe(text)


def test_what_is_no_recipe_is_refused(toys: SimpleNamespace) -> None:
    with pytest.raises(UserError, match=r"3 \(int\) is not a recipe"):
        toys.toy_shrink | 3
    with pytest.raises(UserError, match="toy_again needs 'times'"):
        toys.toy_shrink | toys.toy_again  # the class: it has no ready-made instance
    with pytest.raises(UserError, match="keep must be int, but a very large number"):
        toys.toy_shrink(10**5000)


# Expansion


def test_methods_that_stand_for_others_are_written_out() -> None:
    recipe = Recipe("toy_teach | toy_again(2, toy_again(2, toy_shrink(3)) | toy_odd) | toy_teach")
    names = [str(phase).split("(")[0] for phase in recipe.phases()]
    assert names == ["toy_teach", *["toy_shrink", "toy_shrink", "toy_odd"] * 2, "toy_teach"]


def test_inside_a_phase_an_expansion_is_one_phase() -> None:
    (phase,) = Recipe("toy_again(1, toy_shrink + toy_train) + toy_teach").phases()
    assert phase == Recipe("toy_shrink + toy_teach + toy_train")[0]
    for times in (0, 2):
        with pytest.raises(UserError, match="not one, so"):
            Recipe(f"toy_again({times}, toy_shrink) + toy_teach").phases()
    with pytest.raises(UserError, match="one training setting"):
        Recipe("toy_again(1, toy_train) + toy_train(1)").phases()


def test_an_expansion_ends() -> None:
    with pytest.raises(UserError, match="expand again"):
        Recipe("toy_loop").phases()
    with pytest.raises(UserError, match="more than 10000 phases"):
        Recipe("toy_again(200, toy_again(200, toy_shrink))").phases()


# Methods and their registry


def test_a_method_names_and_describes_itself(toys: SimpleNamespace) -> None:
    assert type(toys.toy_shrink).name == "toy_shrink"
    assert type(toys.toy_shrink).about == "Keep a few things."
    assert toys.toy_shrink.options() == "keep=6, which='even'"
    assert toys.toy_again(2, "toy_shrink").settings() == {"times": 2, "inner": "toy_shrink(keep=6, which='even')"}


def test_names_keep_acronyms_together_and_shared_bases_out() -> None:
    with METHODS.for_now():

        class ToyBERTPrune2Heads(Method):
            pass

        class _ToyBase(Method):
            keep: int = 1

        class ToyChild(_ToyBase):
            more: int = 2

        assert "toy_bert_prune2_heads" in METHODS
        assert "_toy_base" not in METHODS
        assert str(ToyChild(5)) == "toy_child(keep=5, more=2)"
    assert "toy_child" not in METHODS


def test_a_setting_cannot_hide_a_hook() -> None:
    with METHODS.for_now(), pytest.raises(TypeError, match="cannot be called 'plan'"):

        class ToyBad(Method):
            plan: int = 3  # type: ignore[assignment]


def test_settings_are_copied_and_numbers_made_plain(toys: SimpleNamespace) -> None:
    class Double(float):
        def __repr__(self) -> str:
            return "Double"

    numbers = [1, 2]
    odd = toys.toy_odd(numbers, share=Double(0.25))
    numbers.append(3)
    assert str(odd) == "toy_odd(numbers=[1, 2], table={}, share=0.25, free=None)"
    assert str(toys.toy_odd((3, 4))) == "toy_odd(numbers=[3, 4], table={}, share=0.5, free=None)"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty importable package."""
    folder = tmp_path / "toy_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.startswith("toy_package")]:
        del sys.modules[name]


METHOD = "from smallbert.methods import Method\n\n\nclass ToyFound(Method):\n    keep: int = 1\n"


def test_a_registry_reads_its_package_on_first_use_only(package: Path) -> None:
    (package / "one.py").write_text("import toy_package\ntoy_package.seen = getattr(toy_package, 'seen', 0) + 1\n")
    registry: Registry[Any] = Registry("toy", package="toy_package")
    assert "toy_package.one" not in sys.modules
    assert len(registry) == 0 and "x" not in registry and list(registry) == [] and registry.get("x") is None
    assert sys.modules["toy_package"].seen == 1


def test_a_file_that_cannot_be_imported_is_not_hidden(package: Path) -> None:
    (package / "broken.py").write_text("import no_such_module_anywhere\n")
    registry: Registry[Any] = Registry("toy", package="toy_package")
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
            len(registry)


def test_two_methods_of_one_name_are_refused_but_a_second_import_is_not(package: Path) -> None:
    (package / "one.py").write_text(METHOD)
    (package / "two.py").write_text(METHOD)
    with METHODS.for_now():
        one = importlib.import_module("toy_package.one")
        importlib.reload(one)
        assert METHODS["toy_found"] is one.ToyFound
        with pytest.raises(
            UserError, match=r"two methods are called 'toy_found', in toy_package\.one and in toy_package\.two"
        ):
            importlib.import_module("toy_package.two")


def test_an_unknown_name_is_answered() -> None:
    with pytest.raises(UnknownName, match=r"^no method is called 'toy_shrnk'\. Did you mean 'toy_shrink'\?"):
        METHODS["toy_shrnk"]
    assert METHODS.get("toy_shrnk") is None


# The front door


def test_ready_made_methods_come_from_the_package(toys: SimpleNamespace) -> None:
    from smallbert import toy_again, toy_shrink

    assert toy_shrink == toys.toy_shrink
    assert toy_shrink(4) | toy_again(2, toy_shrink) == Recipe("toy_shrink(4) | toy_again(2, toy_shrink)")
    assert smallbert.Recipe is Recipe
    assert {"toy_shrink", "Recipe"} <= set(dir(smallbert))
    assert all(hasattr(smallbert, name) for name in smallbert.NAMES)
    with pytest.raises(AttributeError, match="has no attribute 'toy_shrnk'"):
        smallbert.toy_shrnk  # noqa: B018


def test_importing_and_looking_for_a_submodule_stay_light() -> None:
    code = (
        "import sys, smallbert.methods, smallbert.recipes.recipe, smallbert.recipes.space, smallbert.presets\n"
        "from smallbert import errors, machine\n"
        "assert smallbert.METHODS._unread, 'the methods were imported'\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_method_is_called_like_a_module_or_a_preset() -> None:
    modules = {path.stem for path in Path(smallbert.__file__).parent.iterdir()}
    assert not modules & set(METHODS), "`from smallbert import name` would give one or the other by chance"
    assert not set(PRESETS) & set(METHODS)


# Presets


def test_presets_are_found_by_either_spelling() -> None:
    assert PRESETS["half-int8"] is PRESETS["half_int8"]
    assert PRESETS["half-int8"].name == "half-int8"
    with pytest.raises(UnknownName, match="Did you mean 'bermo'"):
        PRESETS["berno"]


def test_a_preset_is_a_recipe_and_a_part_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"toy_one": "toy_shrink | toy_teach", "toy_two_part": "toy_one | toy_odd", "toy_single": "toy_shrink(2)"}
    for name, recipe in rows.items():
        monkeypatch.setitem(PRESETS._things, name, SimpleNamespace(recipe=recipe))
    assert Recipe("toy_one") == Recipe("toy_shrink | toy_teach")
    assert Recipe("toy_two_part | toy_teach(1)") == Recipe("toy_shrink | toy_teach | toy_odd | toy_teach(1)")
    assert Recipe("toy_odd | toy_two-part") == Recipe("toy_odd | toy_two_part")
    assert Recipe("toy_single + toy_teach") == Recipe("toy_shrink(2) + toy_teach")
    with pytest.raises(UserError, match=r"\+ joins methods of one phase"):
        Recipe("toy_one + toy_odd")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_read_and_says_where_it_comes_from(name: str) -> None:
    preset = PRESETS[name]
    assert preset.reference and preset.about.endswith(".")
    scores = preset.published["scores"]
    assert preset.published["source" if scores else "why"]
    assert all(0 < value <= 100 for metrics in scores.values() for value in metrics.values())
    recipe = Recipe(preset.recipe)
    assert recipe.phases() and Recipe(str(recipe)) == recipe
