"""The arrows of the architecture: dspark_core <- server <- calibration, no cycle anywhere, no long file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("dspark_core", "server", "calibration")  # a package may import those to its left
OUTER = ("tests", "benchmarks")  # may import every package, may not be imported by one
MAX_LINES = 300


def modules_of(root: Path, package: str) -> dict[str, Path]:
    """Dotted module name -> file, for every module of a package (its own name stands for its __init__)."""
    return {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted((root / package).rglob("*.py"))
    }


def names_imported(module: str, path: Path) -> Iterator[str]:
    """The absolute dotted names that a file imports, at any depth of the file, type-only imports included."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, node.module] if node.module else base)
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def import_graph(root: Path, packages: tuple[str, ...]) -> dict[str, set[str]]:
    """Module -> the modules of these packages that it imports.

    `from a.b import c` is an edge to a.b.c if that is a module, else to a.b.
    """
    modules = {name: path for package in packages for name, path in modules_of(root, package).items()}

    def module_of(name: str) -> str | None:
        return next((n for n in (name, name.rpartition(".")[0]) if n in modules), None)

    return {
        module: {found for name in names_imported(module, path) if (found := module_of(name))}
        for module, path in modules.items()
    }


def wrong_arrows(root: Path) -> list[str]:
    """Imports from a package to its right, or to the tests and benchmarks."""
    return [
        f"{module} imports {name}"
        for rank, package in enumerate(LAYERS)
        for module, path in modules_of(root, package).items()
        for name in names_imported(module, path)
        if name.partition(".")[0] in (*LAYERS[rank + 1 :], *OUTER)
    ]


def import_cycle(root: Path) -> list[str]:
    """One cycle of imports between modules of the three packages, its first module repeated last, or []."""
    try:
        TopologicalSorter(import_graph(root, LAYERS)).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def long_files(root: Path) -> list[str]:
    """Python files of MAX_LINES lines or more."""
    files = [path for package in (*LAYERS, *OUTER) for path in modules_of(root, package).values()]
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    return [f"{path.relative_to(root)}: {lines} lines" for path, lines in lengths.items() if lines >= MAX_LINES]


def test_the_walk_sees_the_packages() -> None:
    graph = import_graph(ROOT, LAYERS)
    assert {module.partition(".")[0] for module in graph} == set(LAYERS)
    assert any(name.startswith("dspark_core.") for name in graph["server.engine"])


def test_arrows_point_one_way() -> None:
    assert wrong_arrows(ROOT) == []


def test_no_import_cycle() -> None:
    assert import_cycle(ROOT) == []


def test_files_stay_short() -> None:
    assert long_files(ROOT) == []


def write_tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("dspark_core/a.py", "import server.b"),
        ("dspark_core/deep/a.py", "def late():\n    from server import b"),
        ("server/a.py", "from calibration.records import Record"),
        ("dspark_core/a.py", "import tests.helpers"),
    ],
)
def test_a_wrong_arrow_is_found(tmp_path: Path, file: str, text: str) -> None:
    write_tree(tmp_path, {file: text, "server/b.py": "import dspark_core.a\nimport torch\n"})
    assert len(wrong_arrows(tmp_path)) == 1


@pytest.mark.parametrize("back", ["from server import b", "from . import b", "from .b import f", "import server.b"])
def test_a_cycle_is_found(tmp_path: Path, back: str) -> None:
    write_tree(tmp_path, {"server/__init__.py": "", "server/a.py": back, "server/b.py": "from server.a import g"})
    assert set(import_cycle(tmp_path)) == {"server.a", "server.b"}


def test_a_cycle_through_a_package_is_found(tmp_path: Path) -> None:
    write_tree(tmp_path, {"server/__init__.py": "from .a import f", "server/a.py": "from server import g"})
    assert set(import_cycle(tmp_path)) == {"server", "server.a"}


def test_a_long_file_is_found(tmp_path: Path) -> None:
    write_tree(tmp_path, {"server/a.py": "\n" * MAX_LINES, "server/b.py": "\n" * (MAX_LINES - 1)})
    assert long_files(tmp_path) == [f"server/a.py: {MAX_LINES} lines"]
