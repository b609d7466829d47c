"""What the relay is measured against: ways to put one proxy in front of two backends, each started as its documentation says."""

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.settings import search_path

HOST = "127.0.0.1"
PEERS = ("smg", "vllm-router", "nginx")
OURS = ("midstream", "midstream-redis", "midstream-cursors")


class PeerMissing(Exception):
    """It is not installed; the message says how it would be."""


@dataclass(frozen=True, slots=True)
class Proxy:
    """A row of the table. `command` is told its port, a second free one, the backends' ports, Redis and a directory of its own."""

    name: str
    command: Callable[[int, int, Sequence[int], str, Path], tuple[str, ...]]
    has_cursors: bool = False
    """Its backends report themselves and send cursors."""
    health: str = "/health"


def find_proxy(name: str, venv: Path) -> Proxy:
    """The proxy of that name; peers are looked for in `venv` and on PATH. Raises PeerMissing."""
    if name == "midstream":
        return Proxy(name, lambda port, _, backends, redis, home: _gateway(port, backends, "memory://"))
    if name == "midstream-redis":
        return Proxy(name, lambda port, _, backends, redis, home: _gateway(port, backends, redis))
    if name == "midstream-cursors":
        return Proxy(name, lambda port, _, backends, redis, home: _gateway(port, (), redis), has_cursors=True)
    if name == "nginx":
        binary = _find(name, venv, "it comes with the system: apt install nginx-light")
        return Proxy(name, lambda port, _, backends, redis, home: _nginx(binary, port, backends, home), health="/health")
    if name not in PEERS:
        raise PeerMissing(f"no proxy is called '{name}'; known: {', '.join((*OURS, *PEERS))}")
    binary = _find(name, venv, f"python -m venv {venv} && {venv}/bin/pip install '.[peers]'")
    make = _smg if name == "smg" else _vllm_router
    return Proxy(name, lambda port, second, backends, redis, home: make(binary, port, second, backends))


def _find(name: str, venv: Path, remedy: str) -> str:
    found = shutil.which(name, path=str(venv / "bin")) or shutil.which(name, path=search_path())
    if found is None:
        raise PeerMissing(f"{name} is not installed ({remedy})")
    return found


def _urls(backends: Sequence[int]) -> tuple[str, ...]:
    return tuple(f"http://{HOST}:{port}" for port in backends)


def _gateway(port: int, backends: Sequence[int], redis: str) -> tuple[str, ...]:
    flags = tuple(flag for url in _urls(backends) for flag in ("--backend", url))
    return (sys.executable, "-m", "gateway", "--host", HOST, "--port", str(port), "--redis", redis, *flags)


def _smg(binary: str, port: int, second: int, backends: Sequence[int]) -> tuple[str, ...]:
    flags = ("--policy", "round_robin", "--log-level", "warn", "--prometheus-port", str(second), "--disable-tokenizer-autoload")
    return (binary, "launch", "--host", HOST, "--port", str(port), *flags, "--worker-urls", *_urls(backends))


def _vllm_router(binary: str, port: int, second: int, backends: Sequence[int]) -> tuple[str, ...]:
    flags = ("--policy", "round_robin", "--log-level", "warning", "--prometheus-port", str(second))
    return (binary, "--host", HOST, "--port", str(port), *flags, "--worker-urls", *_urls(backends))


def _nginx(binary: str, port: int, backends: Sequence[int], home: Path) -> tuple[str, ...]:
    """One worker, nothing buffered, connections to the backends kept."""
    home.mkdir(parents=True, exist_ok=True)
    servers = "".join(f"server {HOST}:{each};" for each in backends)
    temporary = "".join(f"{kind}_temp_path {home}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    location = 'proxy_pass http://b; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;'
    http = f"access_log off; client_max_body_size 64m; {temporary} upstream b {{ {servers} keepalive 2048; }}"
    server = f"server {{ listen {HOST}:{port} backlog=4096; location / {{ {location} }} }}"
    config = home / "nginx.conf"
    config.write_text(
        f"daemon off; worker_processes 1; pid {home}/pid; error_log {home}/error.log;\n"
        f"events {{ worker_connections 8192; }}\nhttp {{ {http} {server} }}\n"
    )
    return (binary, "-c", str(config), "-p", str(home))
