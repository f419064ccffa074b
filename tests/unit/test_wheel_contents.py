"""The wheel contains nothing that only tests and benchmarks use."""

import ast
from collections.abc import Set
from pathlib import Path

import loraplex

ROOT = Path(loraplex.__file__).parent
ENTRY_POINTS = {
    "loraplex",
    "loraplex.__main__",
    "loraplex.cli.main",
    "loraplex.deploy.ray",
    "loraplex.deploy.ray_router",
    "loraplex.frontends.kserve.stub.model",
}
"""The library, the command, what Ray Serve imports, and the model that Triton's Python backend
starts."""
PUBLIC = {
    "loraplex.demo",
    "loraplex.testing.fake_clock",
    "loraplex.testing.running_server",
}
"""What users' own tests may import: the shipped model and the doubles."""


def module_files() -> dict[str, Path]:
    files = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def named_modules(module: str, path: Path, names: Set[str]) -> set[str]:
    """Return the modules that a file imports, or names in a text.

    Texts count because processes are started with `-m`, and rarely used modules are imported by
    name.
    """
    named = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            # The relative imports of this tree stay in their package.
            package = f"{module.rpartition('.')[0]}." if node.level else ""
            name = package + node.module
            named |= {name, *(f"{name}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            named.add(node.value)
    return named & names


def with_packages(module: str) -> set[str]:
    """Return the module and the packages around it, which its import runs."""
    parts = module.split(".")
    return {".".join(parts[:length]) for length in range(1, len(parts) + 1)}


def test_every_module_is_reached_from_an_entry_point():
    files = module_files()
    programs = {f"loraplex.compat.client.{path.stem}" for path in client_programs()}
    left = [*ENTRY_POINTS, *PUBLIC, *programs]
    reached: set[str] = set()
    while left:
        for module in with_packages(left.pop()) - reached:
            reached.add(module)
            left += named_modules(module, files[module], files.keys())
    assert files.keys() <= reached


def client_programs() -> list[Path]:
    """Return the modules that `loraplex compat client` imports by the names of its table."""
    from loraplex.compat.client.programs import PROGRAMS

    return [ROOT / "compat" / "client" / f"{program.module}.py" for program in PROGRAMS]


def test_public_names_exist():
    assert module_files().keys() >= ENTRY_POINTS | PUBLIC
