"""Hidden states on disk: what is read is what was computed, whoever wrote it, and nothing broken or stale is used."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections import namedtuple
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from test_processes import free_port
from test_resume import counted, killed_at, no_pickle
from toys import is_same_state, run, small, stream_of, toy_task

from smallbert.cli import main
from smallbert.errors import RunError, UserError
from smallbert.features import building, computing
from smallbert.features.building import build_store
from smallbert.features.frozen import Frozen
from smallbert.features.plan import plan_store
from smallbert.features.room import Room
from smallbert.features.store import open_store
from smallbert.model.folders import save_folder
from smallbert.model.walk import walk
from smallbert.tasks.task import Split
from smallbert.texts.batches import Layout, make_batch
from smallbert.texts.data import Stream

TASK = toy_task("classify", 48)
SMALL = 12_000  # bytes a shard, for several of them
INDEX = np.array([5, 0, 47, 13, 6])


def build(out, encoder=None, task=TASK, **options):
    encoder = encoder or small()
    return build_store(encoder, stream_of(encoder, task, "train"), out, **{"shard_bytes": SMALL, **options})


@torch.no_grad()
def hidden_of(encoder, task=TASK, index=INDEX):
    batch = make_batch(stream_of(encoder, task, "train"), index, Layout(False, 64))
    return encoder.eval().states(batch).hidden, batch


def contents(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def flip(file: Path, place: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[place] ^= 1
    file.write_bytes(raw)


def full_disk(free: int):
    """A disk with so many bytes left."""
    return patch("shutil.disk_usage", return_value=namedtuple("usage", "total used free")(10**9, 10**9 - free, free))


@pytest.mark.parametrize("tokens", ["all", "first", "mean"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_what_is_read_is_what_was_computed(tokens, dtype, tmp_path):
    encoder = small()
    hidden, batch = hidden_of(encoder)
    store = build(tmp_path / "s", encoder, tokens=tokens, dtype=dtype, shard_bytes=1600)
    assert len(store.about["shards"]) > 1 and len(store) == 48
    wanted = torch.stack([computing.PICKS[tokens](batch, state) for state in hidden])
    found = store.read(INDEX)
    assert found.shape == wanted.shape and found.dtype == (torch.float16 if dtype == "float16" else torch.float32)
    error, size = (found.float() - wanted).abs(), wanted.abs()
    if dtype == "float32":
        assert error.max() < 1e-5  # the company in a batch changes the last digits
    elif dtype == "float16":
        assert (error <= size * 2**-11 + 1e-5).all() and error.max() > 0
    else:  # half a step of a row's own scale, and what rounding the scale itself costs
        assert (error <= size.amax(-1, keepdim=True) / 127 * 0.57 + 1e-5).all() and error.max() > 1e-3
    two = store.read(INDEX, layers=[2, 0])
    assert torch.equal(two, found[[2, 0]])
    if tokens == "all":
        first = store.read(INDEX, first=True)
        before = np.cumsum(store.counts[INDEX]) - store.counts[INDEX]
        assert torch.equal(first, found[:, before])


def test_only_some_layers(tmp_path):
    encoder = small()
    store = build(tmp_path / "s", encoder, layers=[-1, 0], dtype="float32")
    assert store.layers == [0, 2]
    torch.testing.assert_close(store.read([5])[1], hidden_of(encoder, index=np.array([5]))[0][2][0])


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_the_size_is_known_before(dtype, tmp_path):
    encoder = small()
    stream, said = stream_of(encoder, TASK, "train"), []
    plan = plan_store(encoder, stream, dtype=dtype, shard_bytes=SMALL)
    store = build_store(encoder, stream, tmp_path / "s", dtype=dtype, shard_bytes=SMALL, line=said.append)
    files = sorted((tmp_path / "s").glob("0*.safetensors"))
    assert sum(file.stat().st_size for file in files) == plan.total == store.bytes
    numbers = int(stream.views["student"].lengths.sum()) * 3
    bytes_each = {"float32": 64, "float16": 32, "int8": 18}[dtype]
    assert plan.total == numbers * bytes_each + 1024 * len(files)  # no padding; a header a shard
    assert f"{plan.total / 1e6:,.1f} MB in {len(files)} shards" in said[0]
    assert load_file(files[0])["values"].shape[1] == 16 and no_pickle(tmp_path)  # any reader of safetensors can


def test_too_large_for_half_precision_is_said(tmp_path):
    encoder = small()
    with torch.no_grad():
        encoder.backbone.encoder.layer[1].output.LayerNorm.weight.fill_(1e5)
    store = build(tmp_path / "s", encoder)
    assert "values beyond 65504 were clipped there" in store.about["notes"][0]
    assert torch.isfinite(store.read(range(48))).all()
    with torch.no_grad():
        encoder.backbone.encoder.layer[1].output.LayerNorm.weight.fill_(float("inf"))
    with pytest.raises(RunError, match="hidden state 2 of this model has values that are not finite"):
        build(tmp_path / "t", encoder)


SCRIPT = f"""
import os, signal, sys, torch
torch.set_num_threads(1)
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from smallbert.features import building, shards
from smallbert.machine.processes import processes
from test_features import build

out, fatal = Path(sys.argv[1]), sys.argv[2]
real, write = shards.write_file, building._write_shard

def killed_while_writing(path, write):
    if path.name == fatal:
        (path.parent / f".{{path.name}}.halfdone").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    real(path, write)

def told(encoder, stream, plan, out, number, tell):
    print("shard", number, "by", processes().process_index, flush=True)
    write(encoder, stream, plan, out, number, tell)

shards.write_file, building._write_shard = killed_while_writing, told
build(out)
"""
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


def test_killed_and_gone_on_with_is_the_same_to_the_byte(tmp_path):
    whole = build(tmp_path / "whole")
    count = len(whole.about["shards"])
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "s")]
    options = {"env": ENVIRONMENT, "capture_output": True, "text": True, "timeout": 120}
    killed = subprocess.run([*command, "00001.safetensors"], **options)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (tmp_path / "s" / "00000.safetensors").is_file() and not (tmp_path / "s" / "00001.safetensors").exists()
    with pytest.raises(UserError, match=f"is not finished: it has 1 of {count} shards"):
        open_store(tmp_path / "s")
    with patch.object(building, "_write_shard", wraps=building._write_shard) as write:
        build(tmp_path / "s")
    assert [call.args[4] for call in write.call_args_list] == list(range(1, count))
    assert contents(tmp_path / "s") == contents(tmp_path / "whole")
    with patch.object(building, "_write_shard", side_effect=AssertionError):
        build(tmp_path / "s")  # nothing is left to do


HOLD = """
import sys, time
from smallbert.features import building
with open(sys.argv[1], "a") as claims, building._claimed(claims, building.PAPERS):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.mark.slow  # starts a process, which takes seconds to import
@pytest.mark.parametrize("finished", [False, True])
def test_what_killed_writes_left_is_swept_unless_somebody_writes(finished, tmp_path):
    """Of store.json and the lengths, as of shards: by the next build, when nobody alive is at them."""
    out = tmp_path / "store"
    build(out)
    names = {file.name for file in out.iterdir()}
    if not finished:
        (out / "00000.safetensors").unlink()
    left = [out / f".{name}.0123abcd" for name in ("store.json", "lengths.safetensors")]
    for file in left:
        file.touch()
    holder = subprocess.Popen([sys.executable, "-c", HOLD, out / ".claims"], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    building._sweep(out)
    assert all(file.exists() for file in left)
    holder.kill()
    holder.wait()
    build(out)
    assert {file.name for file in out.iterdir()} == names


@pytest.mark.slow  # starts processes, each of which takes seconds to import
def test_two_processes_build_what_one_builds(tmp_path):
    told = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}  # what a launcher tells
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "two"), "none"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [
        subprocess.Popen(command, env={**ENVIRONMENT, **told, "RANK": rank, "LOCAL_RANK": rank}, **pipes)
        for rank in ("0", "1")
    ]
    said = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    one = build(tmp_path / "one")
    lines = [line.split() for out, _ in said for line in out.split("\n") if line.startswith("shard")]
    assert {words[3] for words in lines} == {"0", "1"}
    written = sorted(words[1] for words in lines)
    assert written == [str(number) for number in range(len(one.about["shards"]))]  # each by one of them, none by both
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


def test_a_damaged_shard_is_named(tmp_path, capsys):
    store = build(tmp_path / "s")
    file = tmp_path / "s" / "00001.safetensors"
    flip(file, file.stat().st_size - 5)
    damaged = open_store(tmp_path / "s")
    damaged.read([0])  # lies in another shard
    with pytest.raises(RunError, match=r"00001.safetensors is damaged: its checksum is"):
        damaged.read([store.per_shard])
    assert main(["features", "check", str(tmp_path / "s")]) == 1
    said = capsys.readouterr()
    assert "00001.safetensors is damaged" in said.err and "1 of" in said.out
    flip(file, file.stat().st_size - 5)
    assert main(["features", "check", str(tmp_path / "s")]) == 0
    flip(file, 20)
    with pytest.raises(RunError, match=r"00001.safetensors is missing, truncated or has a damaged header"):
        open_store(tmp_path / "s").read([store.per_shard])
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(RunError, match=r"00001.safetensors has [\d,]+ bytes instead of [\d,]+"):
        open_store(tmp_path / "s")
    file.unlink()
    with pytest.raises(RunError, match=r"00001.safetensors is missing"):
        open_store(tmp_path / "s")
    build(tmp_path / "s")  # writes that one anew
    assert torch.equal(open_store(tmp_path / "s").read(INDEX), store.read(INDEX))


def test_lengths_are_checked_and_repaired_too(tmp_path):
    build(tmp_path / "s")
    before, file = contents(tmp_path / "s"), tmp_path / "s" / "lengths.safetensors"
    for damage in (lambda: flip(file, 1030), file.unlink):
        damage()
        with pytest.raises(RunError, match=r"lengths.safetensors is missing or damaged; delete it if it is there"):
            open_store(tmp_path / "s")
        with patch.object(building, "_write_shard", side_effect=AssertionError):
            build(tmp_path / "s")  # as it says
        assert contents(tmp_path / "s") == before


def test_building_again_repairs_a_damaged_shard(tmp_path):
    build(tmp_path / "s")
    before, said = contents(tmp_path / "s"), []
    for place in (-5, 20):  # in the values, and in the header
        flip(tmp_path / "s" / "00001.safetensors", place)
        with patch.object(building, "_write_shard", wraps=building._write_shard) as write:
            build(tmp_path / "s", verify=True, line=said.append)
        assert [call.args[4] for call in write.call_args_list] == [1] and contents(tmp_path / "s") == before
    assert sum("00001.safetensors is damaged; it is written again" in line for line in said) == 2


@pytest.mark.parametrize("finished", [True, False])
def test_of_two_different_builds_in_one_folder_one_is_refused(finished, tmp_path):
    real, write, plain = building._check_room, building._write_shard, tmp_path / "s"

    def another(*given):  # begins, or even ends, while the first has just looked and found nothing
        real(*given)
        stopped = Mock(side_effect=write if finished else KeyboardInterrupt)
        with patch.object(building, "_check_room", real), patch.object(building, "_write_shard", stopped):
            with nullcontext() if finished else pytest.raises(KeyboardInterrupt):
                build(plain, dtype="int8")

    with patch.object(building, "_check_room", another):
        with pytest.raises(UserError, match="holds other hidden states: dtype is int8, not float16"):
            build(plain)
    assert build(plain, dtype="int8").about["dtype"] == "int8"


def test_progress_is_that_of_the_whole_store(tmp_path):
    seen, write = [], building._write_shard

    def helped(encoder, stream, plan, out, number, tell):
        write(encoder, stream, plan, out, number, tell)
        if number == 0:  # another process does the rest meanwhile
            for other in range(1, len(plan.ranges)):
                write(encoder, stream, plan, out, other, Mock(done=0))

    with patch.object(building, "_write_shard", helped):
        build(tmp_path / "s", say=lambda stage, done, total, info: seen.append((stage, done, total)))
    assert seen[-1] == (building.STAGE, 48, 48) and [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"encoder": small(seed=1)}, "the model differs"),
        ({"task": toy_task("classify", 48, 1)}, "the texts differ"),
        ({"layers": [1]}, r"layers is \[0, 1, 2\], not \[1\]"),
        ({"dtype": "int8"}, "dtype is float16, not int8"),
        ({"tokens": "mean"}, "tokens is all, not mean"),
        ({"length": 9}, "length is None, not 9"),
    ],
)
def test_a_stale_store_is_refused(change, said, finished, tmp_path):
    if finished:
        build(tmp_path / "s")
    else:
        with patch.object(building, "_write_shard", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            build(tmp_path / "s")
    before = contents(tmp_path / "s")
    with pytest.raises(UserError, match=said):
        build(tmp_path / "s", **change)
    assert contents(tmp_path / "s") == before


def test_a_new_head_leaves_a_store_as_it_is(tmp_path):
    store = build(tmp_path / "s")
    tuned = run("mix_layers | train(epochs=1, freeze='backbone', lr=0.1)", small(), TASK, judge=False).encoder
    assert build(tmp_path / "s", tuned).about == store.about
    with pytest.raises(UserError, match="the model differs"):
        build(tmp_path / "s", run("train(epochs=1)", small(), TASK, judge=False).encoder)
    build(tmp_path / "t", run("quantize", small()).encoder)
    with pytest.raises(UserError, match="the model differs"):  # the same weights, otherwise computed with
        build(tmp_path / "t", run("quantize(activations=True)", small()).encoder)


def test_a_store_knows_its_tokenizer_even_where_another_gives_the_same_tokens(tmp_path):
    build(tmp_path / "s")
    encoder = small()
    encoder.tokenizer.add_tokens(["unheard-of"])
    with pytest.raises(UserError, match="holds other hidden states: the tokenizer differs; give"):
        build(tmp_path / "s", encoder)


def test_a_store_knows_the_connections_between_layers(tmp_path):
    encoder = run("connect_layers", small(), TASK).encoder
    build(tmp_path / "s", encoder)
    with torch.no_grad():
        encoder.connections.rows[0][0] = 0.5
    with pytest.raises(UserError, match="holds other hidden states: the model differs; give"):
        build(tmp_path / "s", encoder)


def test_a_store_knows_which_connections_are_used_and_the_stride(tmp_path):
    recipes = ("head", "stride(2)", "connect_layers", "connect_layers(period=2)")
    plain, strided, connected, sparse = (run(recipe, small(), TASK).encoder for recipe in recipes)
    build(tmp_path / "plain", plain)
    build(tmp_path / "connected", connected)
    for place, encoder in (("connected", sparse), ("plain", strided)):
        with pytest.raises(UserError, match="holds other hidden states: the model differs; give"):
            build(tmp_path / place, encoder)


def test_a_stride_learns_behind_a_frozen_backbone():
    before = run("stride(2)", small(), TASK).encoder
    outcome = run("train(freeze='backbone', epochs=2, lr=0.01)", before, TASK)
    assert any("the stride around its layers is trained" in note for note in outcome.notes)
    assert not torch.equal(outcome.encoder.stride.join.weight, before.stride.join.weight)


def test_a_store_tells_two_texts_from_one_with_the_same_tokens(tmp_path):
    """What stands between two texts can be written into one; then the types of its tokens alone differ."""
    one, two = Split(["great film [SEP] poor plot"], None, [0], ["0"]), Split(["great film"], ["poor plot"], [0], ["0"])
    tasks, encoder = [replace(TASK, splits={"train": split}) for split in (one, two)], small()
    first, second = (stream_of(encoder, task, "train").views["student"] for task in tasks)
    assert np.array_equal(first.ids, second.ids) and not np.array_equal(first.types, second.types)
    build(tmp_path / "s", encoder, tasks[0])
    with pytest.raises(UserError, match="holds other hidden states: the texts differ; give"):
        build(tmp_path / "s", encoder, tasks[1])


def test_only_what_is_left_to_write_needs_room(tmp_path):
    whole, file = build(tmp_path / "s"), tmp_path / "s" / "00001.safetensors"
    before, need = contents(tmp_path / "s"), file.stat().st_size
    assert need < whole.bytes
    file.unlink()
    with full_disk(need - 1), pytest.raises(UserError, match="MB free; choose fewer"):
        build(tmp_path / "s")
    with full_disk(need):
        build(tmp_path / "s")
    assert contents(tmp_path / "s") == before


def test_bad_input_is_refused_in_a_sentence(tmp_path):
    for options, said in [
        ({"dtype": "half"}, "dtype was given 'half'; write one of: float32, float16, int8"),
        ({"tokens": "last"}, "tokens was given 'last'; write one of: all, first, mean"),
        ({"layers": [3]}, r"layers was given \[3\]; write all, or indices"),
        ({"layers": []}, r"layers was given \[\]"),
        ({"layers": "last"}, "layers was given 'last'"),
    ]:
        with pytest.raises(UserError, match=said):
            build(tmp_path / "s", **options)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="already holds something else"):
        build(tmp_path)
    with pytest.raises(UserError, match="holds no store of hidden states"):
        open_store(tmp_path)
    (tmp_path / "bad").mkdir()
    for text, said in [
        ("{", "cannot be read"),
        ('{"format": 9}', "has format 9; this version reads 1"),
        (
            '{"format": 1}',
            r"cannot be read \(it has no 'store'\); delete the folder .*bad and repeat the command that made the store",
        ),
        ("[1]", "cannot be read"),
    ]:
        (tmp_path / "bad" / "store.json").write_text(text)
        with pytest.raises(UserError, match=said):
            open_store(tmp_path / "bad")
    with full_disk(1), pytest.raises(UserError, match="MB free; choose fewer"):
        build(tmp_path / "s")
    assert not (tmp_path / "s").exists()
    with pytest.raises(IndexError, match="holds texts 0 to 47"):
        build(tmp_path / "s").read([48])


MEMORY = f"""
import sys, torch
torch.set_num_threads(1)
sys.path.insert(0, {str(Path(__file__).parent)!r})
import numpy as np
from toys import held, small, stream_of, toy_task
from smallbert.features.building import build_store

encoder, task = small(hidden_size=64), toy_task("classify", 6000)
seen = []
store = build_store(encoder, stream_of(encoder, task, "train"), sys.argv[1], dtype="float32", shard_bytes=2**20,
                    say=lambda stage, done, total, info: seen.append(held()))
quarter = len(seen) // 4
print(store.bytes / 2**20, max(seen[-quarter:]) - max(seen[:quarter]))
read, draw = [], np.random.default_rng(0)
for _ in range(400):
    store.read(draw.choice(6000, 32))
    read.append(held())
print(max(read[-100:]) - max(read[:100]))
"""


@pytest.mark.slow
def test_memory_stays_flat(tmp_path):
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "s")]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    size, building_grew, reading_grew = map(float, done.stdout.split())
    assert size > 25 and building_grew < 5 and reading_grew < 5  # MB


def test_the_verbs(tmp_path, capsys):
    save_folder(small(), tmp_path / "model")
    rows = TASK.split("train")
    for name in ("train", "dev"):
        lines = [f"{text},{label}" for text, label in zip(rows.texts, rows.labels, strict=True)]
        (tmp_path / "data" / f"{name}.csv").parent.mkdir(exist_ok=True)
        (tmp_path / "data" / f"{name}.csv").write_text("\n".join(["text,label", *lines]))
    out = str(tmp_path / "s")
    words = ["features", "build", str(tmp_path / "model"), "--task", str(tmp_path / "data"), "--out", out]
    assert main([*words, "--layers", "0,-1", "--dtype", "int8", "--length", "16"]) == 0
    assert "48 texts, 333 tokens, 2 hidden states of width 16, int8: 0.0 MB in 1 shard," in capsys.readouterr().err
    assert main(["features", "info", out, "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert (about["layers"], about["split"], about["length"], about["shards"]) == ([0, 2], "train", 16, 1)
    assert main(words) == 2
    assert "layers is [0, 2], not [0, 1, 2]" in capsys.readouterr().err


# Training from a store.

FROZEN = "train(epochs=4, batch=8, lr=0.01, freeze='backbone', layout={!r}, store={!r})"


def test_memory_is_lent_again_only_when_nobody_holds_it():
    room = Room()
    first = room.take((2, 3), torch.float16)
    place, view = first.data_ptr(), first.fill_(1.0)[1:]
    others = [room.take((2, 3), torch.float16).fill_(2.0) for _ in range(4)]
    del first
    others.append(room.take((2, 3), torch.float16).fill_(3.0))
    assert view.tolist() == [[1.0] * 3] and len({one.data_ptr() for one in (view, *others)}) == 6
    del view
    again = room.take((1, 2), torch.float32)  # smaller, and of another kind
    assert again.data_ptr() == place and again.shape == (1, 2) and again.dtype == torch.float32
    assert room.take((200,), torch.float32).shape == (200,)  # larger than any piece there is


def test_texts_are_put_where_their_tokens_stand(tmp_path):
    """A batch brings each text's states at its tokens and zeros elsewhere, also in memory that was used before."""
    encoder = run("head | pool_layers(layers=[2, 0])", small(), TASK).encoder
    stream = stream_of(encoder, TASK, "train")
    store = build(tmp_path / "s", encoder, dtype="float32")
    frozen = Frozen(store, stream, [0, 2], False)
    for layout in (Layout(False, 64), Layout(True, 64, grain=32)):
        for index in (INDEX, INDEX[::-1].copy(), np.arange(7, 19)):
            frozen._room.take((2, 900, store.about["width"]), torch.float32).fill_(torch.nan)
            batch = frozen.make_batch(index, layout, 16)
            hidden, real = batch.hidden, batch.tokens()
            for place, number in enumerate((0, 2)):
                wanted = torch.cat([store.read([text])[number] for text in index])
                assert torch.equal(hidden[place][real], wanted)
                assert not hidden[place][~real].any()


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize(
    ("kind", "begin"),
    [
        ("classify", "head"),
        ("classify", "head(pool='mean')"),
        ("regress", "mix_layers"),
        ("pair", "gate_layers"),
        ("pair", "head | pool_layers"),
        ("tag", "mix_layers"),
        ("answer", "head"),
    ],
)
def test_a_head_learns_the_same_from_a_store(kind, begin, layout, tmp_path):
    task = toy_task(kind, 24)
    before = run(begin, small(), task).encoder
    build(tmp_path / "s", before, task, dtype="float32")
    made = {
        store: run(FROZEN.format(layout, store), before, task, judge=False)
        for store in ("none", str(tmp_path / "s"), "auto")
    }
    live = made["none"].encoder
    moved = max((one - before.state_dict()[name]).abs().max() for name, one in live.state_dict().items())
    assert moved > 0.01
    for store, bound in ((str(tmp_path / "s"), 2e-5), ("auto", 5e-3)):
        assert any("the frozen backbone ran once, without dropout" in note for note in made[store].notes)
        for name, one in live.state_dict().items():
            if (kind, name) == ("answer", "heads.task.out.bias"):
                continue  # a softmax does not see it: its gradient is rounding noise
            torch.testing.assert_close(made[store].encoder.state_dict()[name], one, atol=bound, rtol=0.0, msg=name)


@pytest.mark.parametrize(
    ("begin", "kept"),
    [
        ("pool_layers(layers=[0, 1])", [0, 1]),
        ("pool_layers('mix', layers=[1])", [1]),
        ("mix_layers(layers=[0])", [0, 3]),  # a mixture may be let in step by step from the last
        ("pool_layers(layers=[1], detach=True)", [1, 3]),
    ],
)
def test_only_what_is_read_is_kept_and_handed_over_in_its_place(begin, kept, tmp_path):
    task, three = toy_task("pair", 12), small(layers=3)
    before = run("head", three, task).encoder
    recipe = f"{begin} + {FROZEN.format('padded', '{}')}".replace("epochs=4", "epochs=1")
    live = run(recipe.format("none"), before, task, judge=False).encoder
    build(tmp_path / "s", before, task, layers=kept, dtype="float32")
    given = run(recipe.format(tmp_path / "s"), before, task, judge=False)
    assert f"{len(kept)} hidden state" in given.notes[-1]
    for name, one in live.state_dict().items():
        torch.testing.assert_close(given.encoder.state_dict()[name], one, atol=2e-5, rtol=0.0, msg=name)
    run(recipe.format("auto"), before, task, judge=False, states=tmp_path / "auto")
    (made,) = (tmp_path / "auto").iterdir()
    assert open_store(made).layers == kept
    build(tmp_path / "t", before, task, layers=[kept[-1] - 1])
    with pytest.raises(UserError, match=rf"of the layers \[{kept[-1] - 1}\], and the head reads \{kept}"):
        run(recipe.format(tmp_path / "t"), before, task)


def test_layers_above_the_last_one_kept_do_not_run(tmp_path):
    encoder = small(layers=3)
    whole = build(tmp_path / "all", encoder)
    for layer in encoder.backbone.encoder.layer[1:]:
        layer.register_forward_pre_hook(lambda *_: pytest.fail("a layer ran for nothing"))
    assert torch.equal(build(tmp_path / "low", encoder, layers=[0, 1]).read(INDEX), whole.read(INDEX, [0, 1]))


def test_the_backbone_runs_once_a_text(tmp_path):
    seen = []
    before = run("head", small(), TASK).encoder
    real = computing.make_batch

    def running(*given):  # a walk that nobody asks for a state runs no layer
        seen.append(0)
        yield from walk(*given)

    with patch.object(
        computing, "make_batch", lambda stream, index, *rest: seen.append(len(index)) or real(stream, index, *rest)
    ):
        with (
            patch("smallbert.model.encoder.collect", side_effect=AssertionError),
            patch("smallbert.model.encoder.walk", running),
        ):
            run(FROZEN.format("auto", "auto"), before, TASK, judge=False)
            assert sum(seen) == 48 and seen.count(0) == len(seen) // 2
            # Another run, of another seed, finds them.
            run(FROZEN.format("auto", "auto"), before, TASK, 1, judge=False, states=tmp_path)
            run(FROZEN.format("auto", "auto"), before, TASK, 2, judge=False, states=tmp_path)
    assert sum(seen) == 96


def test_killed_while_training_from_a_store(tmp_path):
    recipe = "mix_layers | train(epochs=4, batch=8, lr=0.01, freeze='backbone')"
    task = toy_task("classify", 24)
    with killed_at(7):
        run(recipe, small(), task, work=tmp_path, pause=0.0)
    assert no_pickle(tmp_path)
    with counted() as taken, patch.object(building, "_write_shard", side_effect=AssertionError):
        resumed = run(recipe, small(), task, work=tmp_path)  # and no hidden state is computed again
    assert taken == [(step, 12) for step in range(7, 12)]
    assert is_same_state(resumed.encoder, run(recipe, small(), task).encoder)
    assert not list(tmp_path.glob("*.states")) and not list(tmp_path.glob("*.checkpoint"))


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ("distill + {}", "a teacher reads the same batches"),
        ("movement(0.5, train_weights=False) + {}", "a method changes its weights in the forward pass"),
        ("connect_layers | {}", "the connections between its layers are trained"),
        ("pool_layers(masked=False) + {}", "the head reads padding"),
    ],
)
def test_what_needs_the_backbone_runs_it(recipe, why, tmp_path):
    before = run("train(epochs=1, batch=8)", small(), TASK, judge=False).encoder
    settings = "train(epochs=2, batch=8, lr=0.01, freeze='backbone', store={!r})"
    outcome = run(recipe.format(settings.format("auto")), before, TASK, judge=False)
    assert f"the frozen backbone ran at every step, without dropout: {why}" in outcome.notes
    build(tmp_path / "s", before)
    with pytest.raises(UserError, match=f"stored hidden states cannot be used here: {why}"):
        run(recipe.format(settings.format(str(tmp_path / "s"))), before, TASK, judge=False)


def test_a_store_that_does_not_fit_is_refused(tmp_path):
    frozen = "train(epochs=2, batch=8, freeze='backbone', store={!r})"
    named = frozen.format(str(tmp_path / "s"))
    with pytest.raises(UserError, match="holds no store"):
        run(named, small(), TASK)
    build(tmp_path / "s", layers=[2], tokens="first")
    run(named, small(), TASK, judge=False)
    for recipe, encoder, task, said in [
        (named, small(seed=3), TASK, "is of another model"),
        (named, small(), toy_task("classify", 48, 1), "is of other texts"),
        (f"mix_layers | {named}", small(), TASK, r"is of the layers \[2\], and the head reads \[0, 1, 2\]"),
        (f"head(pool='mean') | {named}", small(), TASK, "is of first tokens, and the head reads mean"),
    ]:
        with pytest.raises(UserError, match=said):
            run(recipe, encoder, task)
    with pytest.raises(UserError, match="only with freeze='backbone'"):
        run(f"train(store={str(tmp_path / 's')!r})", small(), TASK)


def test_without_room_the_backbone_runs():
    with full_disk(1):
        outcome = run("train(epochs=2, batch=8, freeze='backbone')", small(), TASK, judge=False)
    assert any("ran at every step, without dropout: the store needs" in note for note in outcome.notes)


def test_no_texts():
    encoder = small()
    stream = stream_of(encoder, TASK, "train")
    empty = Stream(
        {"student": type(stream.views["student"])(np.zeros(0), np.zeros(0), np.zeros(1, np.int64))}, None, "classify"
    )
    with pytest.raises(UserError, match="there are no texts"):
        plan_store(encoder, empty)
