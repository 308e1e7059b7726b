"""Two processes give what one gives."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from toys import is_same_state, run, small, toy_task

from smallbert.model.folders import load_folder
from smallbert.training.masks import maskable

TEXT = str(Path(__file__).parent / "data" / "own" / "text.txt")
SETTINGS = "train(epochs=2, batch=8, lr=0.001, dropout=0.0)"  # of 25 examples: every fourth batch holds one alone
RUNS = {
    "classify": f"mix_layers(dropout=0.0) | {SETTINGS} | magnitude(0.5) + distill + {SETTINGS}",
    "tag": f"{SETTINGS} | distill(alpha=0.5) + align('gram') + align(transform='linear') + {SETTINGS} | "
    f"align('first', transform='linear_each', schedule='progressive', task=0.0) + {SETTINGS}",
    "answer": f"train(epochs=1, batch=8, lr=0.001, dropout=0.0, layout='packed') | {SETTINGS}",
    "regress": f"pretrain({TEXT!r}, steps=5, batch=5, length=16, lr=0.001, dropout=0.0) | {SETTINGS} | "
    f"augment(2, ['delete', 'grams']) + distill(alpha=0.5) + {SETTINGS}",
}
PRUNED = {  # by masks that each process decides on for itself
    "movement": "prune(0.8) | movement(0.3, what='layers+embeddings', init='magnitude', fresh=True)",
    "smooth_movement": "smooth_movement(0.3, window=2)",
    "second_order": "second_order(0.3, events=2, gradients=6, block=8, examples=4, damp=1e-4)",
    "rpp": "rpp(pull=1.0, steps=2)",
}
# A softmax does not see what is added to all its inputs alike: the gradient of these is rounding noise, which Adam
# blows up to full steps.
UNSEEN = {"answer": ("key.bias", "layer.1.output.LayerNorm.bias", "heads.task.out.bias")}
MADE = 10  # models in folders of their own, one after the other
SCRIPT = f"""
import sys, torch
torch.set_num_threads(1)
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from smallbert.machine.processes import processes
from smallbert.making.make import make_one
from smallbert.making.starting import tiny_start
from smallbert.methods import second_order
from smallbert.model.folders import save_folder
from toys import run, small, toy_task

folder, rank = Path(sys.argv[1]), processes().process_index
assert processes().num_processes == 2
for kind, recipe in {RUNS!r}.items():
    outcome = run(recipe, small(), toy_task(kind, 25), work=folder / "work" / kind, pause=0.0, judge=False)
    save_folder(outcome.encoder, folder / f"{{kind}}-{{rank}}")
    processes().wait_for_everyone()
if rank:  # as a GPU may, where sums are not always added up in the same order
    add = second_order.add_gradient
    second_order.add_gradient = lambda inverse, slope, count: add(inverse, slope * 1.001, count)
for name, method in {PRUNED!r}.items():
    outcome = run(f"{{method}} + {SETTINGS}", small(), toy_task("classify", 25), judge=False)
    save_folder(outcome.encoder, folder / f"{{name}}-{{rank}}")
    processes().wait_for_everyone()
task, settings = toy_task("classify", 25), {{"kind": "machinery check", "seconds": None}}
for seed in range({MADE}):
    make_one("head", tiny_start(), task, seed, folder / "made", **settings)
processes().destroy_process_group()
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.slow  # starts processes, each of which takes seconds to import
def test_two_processes_equal_one(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
    ]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", str(free_port())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [*launch, str(tmp_path / "script.py"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    for kind, recipe in RUNS.items():
        ranks = [load_folder(tmp_path / f"{kind}-{rank}") for rank in (0, 1)]
        assert is_same_state(*ranks)  # both processes hold the same weights to the bit
        one = run(recipe, small(), toy_task(kind, 25), judge=False).encoder
        before = run("head" if kind != "classify" else "mix_layers", small(), toy_task(kind, 25)).encoder.state_dict()
        for name, tensor in one.state_dict().items():
            if name.endswith(UNSEEN.get(kind, "key.bias")):
                continue
            torch.testing.assert_close(ranks[0].state_dict()[name], tensor, atol=2e-5, rtol=1e-4, msg=f"{kind} {name}")
        moved = (one.head.out.weight - before["heads.task.out.weight"]).abs().max()
        assert moved > 1e-3  # a hundred times what is allowed above
    assert len(list((tmp_path / "made" / "cards").iterdir())) == MADE  # neither is in the other's way
    assert len(list((tmp_path / "made" / "models").iterdir())) == MADE
    for name, method in PRUNED.items():
        ranks = [load_folder(tmp_path / f"{name}-{rank}") for rank in (0, 1)]
        assert is_same_state(*ranks), name
        one = run(f"{method} + {SETTINGS}", small(), toy_task("classify", 25), judge=False).encoder
        kept = [sum(int(model.get_parameter(n).count_nonzero()) for n in maskable(one)) for model in (one, ranks[0])]
        assert kept[0] == pytest.approx(kept[1], abs=40 if name == "rpp" else 0), name  # of 4096
        assert 200 < kept[0] < 3500
