"""Reading files as they really are: byte order marks, quotes that are only characters, clear words when broken."""

import csv
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from smallbert.errors import UserError

Columns = dict[str, list[Any]]


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, without a byte order mark and with plain line ends."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; check the name and the rights") from error
    if not data.strip():
        raise UserError(f"{path} is empty; give a file with at least one row")
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        encoding = "UTF-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "WINDOWS-1252"
        raise UserError(
            f"{path}, line {line}: byte 0x{data[error.start]:02x} is not UTF-8; "
            f"convert the file first, for example: iconv -f {encoding} -t UTF-8 {path.name} > new{path.suffix}"
        ) from None


def read_plain(
    path: Path, header: Sequence[str] | None = None, needed: Iterable[str] = (), skip_ragged: bool = False
) -> tuple[dict[str, list[str]], int]:
    """Columns of a file where a tab always separates and a quote is only a character, and how many rows were skipped.

    `header` names the columns of files that have no header line.

    >>> read_plain(Path("dev.tsv"))       # 'sentence<tab>label', 'it "works"<tab>1'
    ({'sentence': ['it "works"'], 'label': ['1']}, 0)
    """
    lines = read_text(path).rstrip("\n").split("\n")
    names = list(header or lines[0].split("\t"))
    first = 0 if header else 1
    check_columns(path, names, needed)
    rows = [line.split("\t") for line in lines[first:]]
    if not rows:
        raise UserError(f"{path} has a header line and no rows; give a file with at least one row")
    whole = [row for row in rows if len(row) == len(names)]
    if len(whole) < len(rows) and not skip_ragged:
        number, row = next((number, row) for number, row in enumerate(rows) if len(row) != len(names))
        raise _ragged(path, number + first + 1, len(row), len(names))
    # Plain lists of the few columns wanted: a dictionary per row would take seconds on 360,000 rows.
    return {name: [row[at] for row in whole] for at, name in enumerate(names)}, len(rows) - len(whole)


def read_columns(path: Path) -> Columns:
    """Columns of a user's own .csv, .tsv, .jsonl or .parquet file.

    >>> read_columns(Path("reviews.csv"))      # 'review,stars', '"Well, no.",1'
    {'review': ['Well, no.'], 'stars': ['1']}
    """
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise UserError(f"{path} ends in '{path.suffix}', which is not supported; supported: {' '.join(READERS)}")
    columns = reader(path)
    if not columns or not len(next(iter(columns.values()))):
        raise UserError(f"{path} has a header and no rows; give a file with at least one row")
    return columns


def check_columns(path: Path, names: Sequence[str], needed: Iterable[str]) -> None:
    """Raise an error that names the columns there are if one is missing."""
    from difflib import get_close_matches

    for name in needed:
        if name not in names:
            near = get_close_matches(name, names, 1, 0.5)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise UserError(f"{path} has no column '{name}'; its columns are: {', '.join(map(str, names))}{hint}")


def find_folder(task: str, data: Path | str | None, places: Iterable[str], files: Iterable[str]) -> Path:
    """The first of `places` under the data folder that holds one of `files` (patterns allowed).

    >>> find_folder("sst2", "data", ("glue/SST-2", "SST-2", "."), ("train.tsv", "dev.tsv"))
    PosixPath('data/glue/SST-2')
    """
    patterns = list(files)
    root = data or os.environ.get("SMALLBERT_DATA")
    if not root:
        raise UserError(
            f"task {task} needs its files: write --data FOLDER (data=… in Python) or set SMALLBERT_DATA, "
            f"where FOLDER holds {next(iter(places))}/{patterns[0]}"
        )
    if not Path(root).is_dir():
        raise UserError(
            f"the data folder {root} of task {task} is not a folder; write --data FOLDER or set SMALLBERT_DATA"
        )
    folders = [Path(root) / place for place in dict.fromkeys(places)]
    for folder in folders:
        if any(file.is_file() for pattern in patterns for file in folder.glob(pattern)):
            return folder
    looked = ", ".join(str(folder) for folder in folders)
    raise UserError(f"no files of task {task} found: looked for {' or '.join(patterns)} in {looked}")


def first_file(folder: Path, patterns: Iterable[str]) -> Path | None:
    """The first file that is there, trying the patterns in order."""
    return next((file for pattern in patterns for file in sorted(folder.glob(pattern)) if file.is_file()), None)


def fingerprint_of(paths: Iterable[Path]) -> str:
    """A short hash of the names and bytes of the files read, so that a card says which data it is about."""
    digest = hashlib.sha256()
    for path in paths:
        data = path.read_bytes()
        digest.update(f"{path.name}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()[:16]


def _read_separated(path: Path, separator: str) -> Columns:
    csv.field_size_limit(2**31 - 1)  # the default refuses texts over 131,072 characters
    lines = csv.reader(io.StringIO(read_text(path), newline=""), delimiter=separator, strict=True)
    rows: list[list[str]] = []
    try:
        for row in lines:
            if rows and row and len(row) != len(rows[0]):
                raise _ragged(path, lines.line_num, len(row), len(rows[0]))
            if row:
                rows.append(row)
    except csv.Error as error:
        raise UserError(
            f'{path}, line {lines.line_num}: {error}; a field that holds a quote is written "like ""this""", '
            "or save the rows as .jsonl"
        ) from None
    names = rows[0]
    if len(set(names)) < len(names):
        raise UserError(f"{path} names a column twice: {', '.join(names)}; give each column its own name")
    return {name: [row[at] for row in rows[1:]] for at, name in enumerate(names)}


def _read_jsonl(path: Path) -> Columns:
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {number}: not JSON ({error.msg}); write one object per line") from None
        if rows and not isinstance(rows[-1], dict):
            raise UserError(
                f'{path}, line {number}: not an object; write one like {{"text": "…", "label": "…"}} per line'
            )
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _read_parquet(path: Path) -> Columns:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise UserError(f"reading {path.name} needs pyarrow: pip install -e '.[data]', or save it as .jsonl") from None
    try:
        columns: Columns = parquet.read_table(path).to_pydict()
        return columns
    except (OSError, arrow.ArrowException) as error:
        raise UserError(f"cannot read {path} as parquet: {str(error).splitlines()[0]}") from None


def _ragged(path: Path, line: int, found: int, known: int) -> UserError:
    return UserError(f"{path}, line {line}: {found} columns where the file has {known}; repair or remove that line")


READERS: dict[str, Callable[[Path], Columns]] = {
    ".csv": lambda path: _read_separated(path, ","),
    ".tsv": lambda path: _read_separated(path, "\t"),
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}
