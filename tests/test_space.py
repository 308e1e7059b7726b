"""Search spaces: a set tries each value, maybe() tries without and with, in the order written."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smallbert.errors import UserError
from smallbert.methods import METHODS, Method
from smallbert.recipes.recipe import Recipe
from smallbert.recipes.space import expand_space


@pytest.fixture(autouse=True, scope="module")
def toys() -> Iterator[None]:
    """Methods of the test's own: a(x, y), b, and twice(recipe)."""
    with METHODS.for_now():

        class ToyA(Method):
            x: int | str | list | dict | None = 0
            y: int = 0

        class ToyB(Method):
            pass

        class ToyTwice(Method):
            inner: Recipe

        yield


def texts(space: str) -> list[str]:
    """The recipes of a space, shortened: toy_a(x=1, y=0) is a1."""
    return [
        str(recipe).replace("toy_a(x=", "a").replace(", y=0)", "").replace("toy_", "") for recipe in expand_space(space)
    ]


@pytest.mark.parametrize(
    ("space", "recipes"),
    [
        ("toy_a(3) | toy_b", ["a3 | b"]),
        ("", ["identity"]),
        ("toy_a({3, 4, 6})", ["a3", "a4", "a6"]),
        ("toy_a({6, 3})", ["a6", "a3"]),
        ("toy_a({-1, 'x', None})", ["a-1", "a'x'", "aNone"]),
        ("toy_a({1, 2}) | toy_a({3, 4})", ["a1 | a3", "a1 | a4", "a2 | a3", "a2 | a4"]),
        ("toy_a({1, 2}, y={3, 4})", [f"a{x}, y={y})" for x in (1, 2) for y in (3, 4)]),
        ("toy_a([{1, 2}, 3])", ["a[1, 3]", "a[2, 3]"]),
        ("toy_a({'k': {1, 2}})", ["a{'k': 1}", "a{'k': 2}"]),
        ("toy_a({1, {2, 3}})", ["a1", "a2", "a3"]),
        ("toy_a({1, 1, 2})", ["a1", "a2"]),
        ("maybe(toy_b)", ["identity", "b"]),
        ("toy_a | maybe(toy_b)", ["a0", "a0 | b"]),
        ("toy_a + maybe(toy_b)", ["a0", "a0 + b"]),
        ("maybe(toy_a) + maybe(toy_b)", ["identity", "b", "a0", "a0 + b"]),
        ("maybe(toy_b) | maybe(toy_b)", ["identity", "b", "b | b"]),
        ("maybe(toy_a({1, 2}) | maybe(toy_b))", ["identity", "a1", "a1 | b", "a2", "a2 | b"]),
        ("{toy_a, toy_b | toy_b} | toy_a(1)", ["a0 | a1", "b | b | a1"]),
        ("toy_twice(toy_a({1, 2}) | maybe(toy_b))", [f"twice(inner={t})" for t in ("a1", "a1 | b", "a2", "a2 | b")]),
    ],
)
def test_a_space_holds_these_recipes_in_this_order(space: str, recipes: list[str]) -> None:
    assert texts(space) == recipes


@settings(deadline=None, max_examples=50)
@given(choices=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), min_size=1, max_size=3))
def test_a_space_is_the_product_of_its_sets(choices: list[list[int]]) -> None:
    space = " | ".join(f"toy_a({{{', '.join(map(str, values))}}})" for values in choices)
    recipes = expand_space(space)
    expected = 1
    for values in choices:
        expected *= len(set(values))
    assert len(recipes) == len(set(recipes)) == expected
    assert recipes == [recipe for same in recipes for recipe in expand_space(str(same))]


PIECES = [*"toy_a toy_b toy_twice maybe ( ) { } [ ] | + , 1 'x' x= : *".split(), " ", "\n", "\r"]


@settings(deadline=None, max_examples=200)
@given(text=st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_any_text_is_a_space_or_a_user_error(text: str) -> None:
    try:
        recipes = expand_space(text)
    except UserError:
        return
    assert recipes and all(Recipe(str(recipe)) == recipe for recipe in recipes)


def test_a_space_too_large_is_refused_before_it_is_made() -> None:
    digits = "{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}"
    with pytest.raises(UserError, match="holds 1,000,000,000,000 recipes, more than the limit of 1,000"):
        expand_space(" | ".join([f"toy_a({digits})"] * 12))
    assert len(expand_space(f"toy_a({digits}, {digits})", limit=100)) == 100
    assert len(expand_space("maybe(toy_a) | maybe(toy_b)", limit=4)) == 4
    with pytest.raises(UserError, match="holds 4 recipes, more than the limit of 3"):
        expand_space("maybe(toy_a) | maybe(toy_b)", limit=3)
    with pytest.raises(UserError, match="more than the limit of 99"):
        expand_space(f"toy_a({digits}, {digits})", limit=99)


@pytest.mark.parametrize("text", ["maybe", "maybe()", "maybe(toy_a, toy_b)", "toy_a | maybe(x=1)"])
def test_maybe_takes_one_recipe(text: str) -> None:
    with pytest.raises(UserError, match=r"maybe takes one recipe, such as maybe\(quantize\(8\)\)\n"):
        expand_space(text)


def test_a_mistake_in_one_choice_is_pointed_at() -> None:
    with pytest.raises(UserError) as caught:
        expand_space("toy_b | toy_a(y={1, 'two'})")
    assert "y must be int, but 'two' (str) was given" in str(caught.value)
    assert str(caught.value).endswith("\n  toy_b | toy_a(y={1, 'two'})\n          ^^^^^^^^^^^^^^^^^^^")
    with pytest.raises(UserError, match="Did you mean 'toy_a'"):
        expand_space("maybe(toyy_a)")


def test_a_plain_recipe_does_not_take_a_space() -> None:
    with pytest.raises(UserError, match="space of many recipes"):
        Recipe("toy_a({1, 2})")
