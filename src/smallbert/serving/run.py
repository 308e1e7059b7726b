"""The process of a server: its socket, its signals, its end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from smallbert.errors import UserError

BACKLOG = 2048  # connections that may wait to be accepted


def check_installed() -> None:
    """Refuse where the extra is not installed."""
    if lost := [name for name in ("fastapi", "uvicorn", "onnxruntime", "tokenizers") if find_spec(name) is None]:
        raise UserError(f"serving needs {', '.join(lost)}; run: pip install -e '.[serve]'")


def bind(host: str, port: int) -> socket.socket:
    """A socket at this address, not yet listening; taken early, so that a port in use is known before any work."""
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise UserError(
            f"cannot serve on {host}:{port} ({error.strerror or error}); give another --port or --host"
        ) from None
    return made


def export_aside(folder: Path, out: Path) -> int:
    """Export a model in a process of its own, so that torch never comes into this one; its exit code."""
    words = ["-m", "smallbert", "export", str(folder), "--to", "onnx", "--out", str(out), "--json"]
    # Its progress shows as ours; its result tells of a folder that will soon be gone.
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL) as child:
        try:
            return child.wait()
        finally:
            child.kill()


def lacks_head(folder: Path) -> bool:
    """Whether a model surely has no head, by its own files; where they do not say, loading it will."""
    try:
        if (own := folder / "encoder.json").is_file():
            return not any("labels" in step["plan"] for step in json.loads(own.read_text(encoding="utf-8"))["history"])
        name = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0]
        return not name.endswith(("SequenceClassification", "TokenClassification", "QuestionAnswering"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def interrupt_on_terminate() -> None:
    """Let SIGTERM end the start like Ctrl-C does, so that what is temporary is removed."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def run_app(app: Any, bound: socket.socket, drain: int, when_ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, then finish what is under way, for at most `drain` seconds."""
    import uvicorn
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    settings: dict[str, Any] = {"log_level": "error", "access_log": False, "ws": "none", "server_header": False}

    def refuse(protocol: Any, why: str) -> None:  # the app never hears of it, so it is counted here
        app.state.metrics.answered("other", 400, 0.0)
        _refuse(protocol)

    settings["http"] = type("Protocol", (AutoHTTPProtocol,), {"send_400_response": refuse})
    server = uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=drain, backlog=BACKLOG, **settings))

    def stop(*_: Any) -> None:
        server.should_exit = True

    # uvicorn puts its own handlers over these, and calls these again at its end, where they must not raise: so 0 is
    # the exit code of a server that was told to stop.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    bound.listen(BACKLOG)
    host, port = bound.getsockname()[:2]
    when_ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
    server.run(sockets=[bound])


def _refuse(protocol: Any) -> None:
    """What is no HTTP gets a sentence in JSON, as all that is wrong does; uvicorn's own would be plain text."""
    body = json.dumps({"error": "this is not a readable HTTP request; send one such as POST /predict"}).encode()
    head = "HTTP/1.1 400 Bad Request", "content-type: application/json", f"content-length: {len(body)}"
    protocol.transport.write("\r\n".join((*head, "connection: close", "", "")).encode() + body)
    protocol.transport.close()


def usable_threads() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
