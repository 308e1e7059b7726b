"""What `smallbert serve` bears: many clients at once, for a minute, on two cores that they share with the server.

    python benchmarks/serving.py --out results/serving
    python benchmarks/serving.py --folder served --clients 50 --seconds 10

The server is a process of its own, started by its command line. Clients are coroutines of this process: each sends its
next request when the last is answered. Lengths are mixed (log-uniform from 2 to 200 words), three of four requests
carry one text, the others 2 to 8. Every answer under load is compared with the answer that the text got when nobody
else asked: one that differs by more than 0.001 is an error, as is any status but 200. Without --folder a fresh head on
--model is served, which is as fast as a trained one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

FAR = 1e-3
TEXTS = 256  # different ones
TICK = os.sysconf("SC_CLK_TCK")


class Client:
    """One connection that is kept open, with as little work a request as Python allows: the server needs the cores."""

    def __init__(self, url: str):
        self.host, self.port = urlsplit(url).hostname or "", urlsplit(url).port

    async def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """The status and the body of an answer."""
        if not hasattr(self, "reader"):
            self.reader, self.writer = await asyncio.open_connection(self.host, self.port)
        head = f"{method} {path} HTTP/1.1\r\nHost: {self.host}\r\nContent-Length: {len(body)}\r\n\r\n"
        self.writer.write(head.encode() + body)
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        length = int(head.split("content-length:")[1].split("\r\n")[0])
        return int(head.split()[1]), await self.reader.readexactly(length)

    def close(self) -> None:
        if hasattr(self, "writer"):
            self.writer.close()


def make_texts(seed: int) -> list[str]:
    """Texts of 2 to 200 words, short ones as frequent as long ones on a scale of doublings."""
    from smallbert.tiny import WORDS

    draw = random.Random(seed)
    lengths = [round(math.exp(draw.uniform(math.log(2), math.log(200)))) for _ in range(TEXTS)]
    return [" ".join(draw.choices(WORDS, k=length)) for length in lengths]


def export_fresh(name: str, folder: Path) -> Path:
    """The named model with a fresh head, as ONNX."""
    from smallbert import load, run_recipe, save_folder
    from smallbert.export import export_onnx
    from smallbert.sources import find_model
    from smallbert.tiny import make_task

    encoder = run_recipe("head", load(find_model(name)), make_task(), device="cpu").encoder
    save_folder(encoder, folder / "model")
    print(export_onnx(folder / "model", folder / "onnx"), flush=True)
    return folder / "onnx"


async def one_client(url: str, texts: list[str], known: list[list[float]], until: float, seed: int, seen: dict) -> None:
    """Ask until time is up; what went wrong is counted, not raised."""
    draw, client = random.Random(seed), Client(url)
    await asyncio.sleep(draw.random())  # not all in the same millisecond
    while time.perf_counter() < until:
        numbers = [draw.randrange(len(texts)) for _ in range(1 if draw.random() < 0.75 else draw.randint(2, 8))]
        body = json.dumps({"texts": [texts[number] for number in numbers]}).encode()
        begun = time.perf_counter()
        try:
            status, answer = await client.ask("POST", "/predict", body)
        except (OSError, asyncio.IncompleteReadError) as error:
            seen["errors"][type(error).__name__] += 1
            client = Client(url)
            continue
        seen["seconds"].append(time.perf_counter() - begun)
        if status != 200:
            seen["errors"][status] += 1
            continue
        got = [list(one["probabilities"].values()) for one in json.loads(answer)["predictions"]]
        wanted = [known[number] for number in numbers]
        if any(
            abs(a - b) > FAR for one, other in zip(got, wanted, strict=True) for a, b in zip(one, other, strict=True)
        ):
            seen["errors"]["wrong answer"] += 1
        seen["texts"] += len(numbers)
    client.close()


async def load(url: str, pid: int, options: argparse.Namespace) -> dict[str, Any]:
    """Put the load on, and tell what came back."""
    texts, client = make_texts(0), Client(url)
    known = []
    for start in range(0, len(texts), 16):
        _, answer = await client.ask("POST", "/predict", json.dumps({"texts": texts[start : start + 16]}).encode())
        known += [list(one["probabilities"].values()) for one in json.loads(answer)["predictions"]]
    cpu = server_facts(pid)["server_cpu_s"], time.process_time()
    before = read_metrics((await client.ask("GET", "/metrics"))[1])
    seen: dict[str, Any] = {"seconds": [], "texts": 0, "errors": Counter()}
    begun = time.perf_counter()
    clients = [
        asyncio.create_task(one_client(url, texts, known, begun + options.seconds, seed, seen))
        for seed in range(options.clients)
    ]
    while time.perf_counter() < begun + options.seconds:
        await asyncio.sleep(min(5, options.seconds))
        took = time.perf_counter() - begun
        print(f"{took:5.0f} s, {len(seen['seconds']):,} requests, errors: {dict(seen['errors'])}", flush=True)
    await asyncio.gather(*clients)
    took = time.perf_counter() - begun
    client.close()  # the server has closed it while it was idle
    after = read_metrics((await Client(url).ask("GET", "/metrics"))[1])
    cuts = statistics.quantiles(seen["seconds"], n=100)
    size = "smallbert_batch_size"
    facts = server_facts(pid)
    batches = {name: after[name] - before.get(name, 0) for name in after if name.startswith(size)}
    return {
        "requests": len(seen["seconds"]),
        "requests_per_s": round(len(seen["seconds"]) / took, 1),
        "texts_per_s": round(seen["texts"] / took, 1),
        **{f"p{part}_ms": round(1000 * cuts[part - 1], 1) for part in (50, 95, 99)},
        "max_ms": round(1000 * max(seen["seconds"]), 1),
        "errors": sum(seen["errors"].values()),
        "errors_by_kind": {str(name): count for name, count in seen["errors"].items()},
        "mean_batch": round(batches[f"{size}_sum"] / batches[f"{size}_count"], 1),
        "batches_up_to": {name.split('"')[1]: int(count) for name, count in batches.items() if "bucket" in name},
        "seconds": round(took, 1),
        "clients_cpu_s": round(time.process_time() - cpu[1], 1),
        "server_cpu_s": round(facts["server_cpu_s"] - cpu[0], 1),
        "server_peak_mb": facts["server_peak_mb"],
    }


def read_metrics(page: bytes) -> dict[str, float]:
    lines = (line.rpartition(" ") for line in page.decode().splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def server_facts(pid: int) -> dict[str, float]:
    """Seconds of processor and the most memory that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    status = Path(f"/proc/{pid}/status").read_text()
    memory = int(status.split("VmHWM:")[1].split()[0]) / 1024
    return {"server_cpu_s": (int(fields[11]) + int(fields[12])) / TICK, "server_peak_mb": round(memory)}


def main() -> None:
    """Start the server, put the load on, stop the server, print and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the record")
    parser.add_argument("--folder", type=Path, help="an ONNX export of a classifier")
    parser.add_argument("--model", default="all-MiniLM-L6-v2")
    for name, value in {"clients": 200, "seconds": 60, "cores": 2, "batch": 32, "threads": 2, "timeout": 30}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as aside:
        folder = options.folder or export_fresh(options.model, Path(aside))
        cores = sorted(os.sched_getaffinity(0))[: options.cores]
        os.sched_setaffinity(0, cores)  # the server inherits it
        words = ["serve", str(folder), "--port", "0"]
        words += [
            word for name in ("batch", "threads", "timeout") for word in (f"--{name}", str(getattr(options, name)))
        ]
        command = [sys.executable, "-m", "smallbert", *words, "--json"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            told = "".join(iter(server.stdout.readline, "}\n")) + "}"  # type: ignore[union-attr]
            found = asyncio.run(load(json.loads(told)["url"], server.pid, options))
            begun = time.perf_counter()
            server.terminate()
            found |= {"exit_code": server.wait(30), "stop_s": round(time.perf_counter() - begun, 2)}
        finally:
            server.kill()
    print(json.dumps(found, indent=1))
    if options.out:
        from smallbert.machine.facts import machine, versions
        from smallbert.machine.files import write_json

        setting = {
            name: getattr(options, name) for name in ("clients", "seconds", "cores", "batch", "threads", "timeout")
        }
        given = [f"--{name} {value}" for name, value in setting.items()]
        facts = {
            "benchmark": "serving",
            "command": " ".join(["python benchmarks/serving.py", *given]),
            "model": options.folder.name if options.folder else f"{options.model} with a fresh head",
            "setting": setting,
            "note": "clients and server share the cores; clients_cpu_s and server_cpu_s say who used them",
        }
        write_json(options.out / "serving.json", {**facts, **found, "versions": versions(), "machine": machine()})
    if found["errors"] or found["exit_code"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
