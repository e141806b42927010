"""The house stays in order: imports point down, heavy packages wait, files and functions stay small, nothing unpickles.

The tables below are the rule; a room that needs more changes them openly.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("export", "models", "quant", "runtime", "train")
ROOT_FILES = {"__init__.py", "__main__.py", "cli.py"}

# What each room may import of the project: whole rooms, or single modules of one.
PROJECT = {
    "models": {"models", "runtime.errors"},
    "quant": {"quant", "runtime.errors"},
    "export": {
        "export", "models", "quant",
        "runtime.errors", "runtime.contracts", "runtime.bundle", "runtime.graph", "runtime.growing", "runtime.tree",
        "runtime.calibration", "runtime.files", "runtime.heads", "runtime.memory", "runtime.pass_times",
        "runtime.plotting", "runtime.prompts", "runtime.providers", "runtime.specs", "runtime.text",
    },
    "train": {
        "train", "models", "quant", "export",
        "runtime.errors", "runtime.contracts", "runtime.bundle",
        "runtime.calibration", "runtime.files", "runtime.progress", "runtime.prompts", "runtime.text",
    },
    "runtime": {"runtime"},
}  # fmt: skip

# What each room may import of others. The runtime's list is the base install and ONNX Runtime.
TORCH = {"torch", "transformers", "accelerate", "optimum"}
OTHERS = {
    "models": {"numpy"},
    "quant": {"numpy", "ml_dtypes"},
    "export": {
        "numpy", "onnx", "onnxruntime", "ml_dtypes", "safetensors", "gguf", "huggingface_hub", "tokenizers", "rich",
    },
    "train": {"numpy", "safetensors", "tokenizers", "onnxruntime", "click"} | TORCH,
    "runtime": {"numpy", "onnxruntime", "tokenizers", "jinja2", "click", "rich"},
    "cli.py": {"click", "rich"},
    "__main__.py": set(),
    "__init__.py": set(),
}  # fmt: skip
# Outside train/, PyTorch and what stands on it enter through these files alone, when they are used.
TORCH_FILES = {
    "export/torch_check.py", "export/optimum.py",
    "export/distil.py", "export/torch_decoder.py", "export/torch_layer.py",
}  # fmt: skip

UNPICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
LONGEST_FILE = 400
LONGEST_FUNCTION = 60


@dataclass(frozen=True)
class Import:
    """One imported module: where, and whether that happens when the file itself is imported."""

    file: str
    line: int
    module: str
    at_load: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.module}"


def sources() -> list[Path]:
    found = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    return sorted([*found, *(ROOT / name for name in ROOT_FILES)])


def read(path: Path) -> tuple[str, ast.Module]:
    return path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def imports_of(path: Path) -> Iterator[Import]:
    file, tree = read(path)

    def visit(node: ast.AST, at_load: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, alias.name, at_load)
        elif isinstance(node, ast.ImportFrom):
            yield from (Import(file, node.lineno, module, at_load) for module in _from(node))
        for child in ast.iter_child_nodes(node):
            inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or _is_typing_block(node)
            yield from visit(child, at_load and not inside)

    return visit(tree, True)


def _from(node: ast.ImportFrom) -> list[str]:
    """`from specedge.runtime import errors` may name a module; it is then that module which counts."""
    module = "." * node.level + (node.module or "")
    parts = module.split(".")
    if parts[0] != "specedge":
        return [module]
    folder = ROOT.joinpath(*parts[1:])
    names = [
        alias.name for alias in node.names if (folder / f"{alias.name}.py").exists() or (folder / alias.name).is_dir()
    ]
    return [f"{module}.{name}" for name in names] or [module]


def _is_typing_block(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


IMPORTS = [found for path in sources() for found in imports_of(path)]


def test_imports_point_down():
    wrong = []
    for found in IMPORTS:
        room = found.file.split("/")[0]
        if room in PROJECT and found.module.startswith("specedge."):
            module = found.module.removeprefix("specedge.")
            allowed = PROJECT[room]
            if module.split(".")[0] not in allowed and not any(
                module == name or module.startswith(f"{name}.") for name in allowed
            ):
                wrong.append(str(found))
    assert not wrong


def test_rooms_import_only_the_packages_they_may():
    wrong = []
    for found in IMPORTS:
        package = found.module.split(".")[0]
        if package == "specedge" or package in sys.stdlib_module_names:
            continue
        room = found.file.split("/")[0]
        allowed = OTHERS[room] | (TORCH if found.file in TORCH_FILES else set())
        if package not in allowed:
            wrong.append(str(found))
    assert not wrong


def test_torch_waits_until_it_is_used():
    early = [str(found) for found in IMPORTS if found.at_load and found.module.split(".")[0] in TORCH]
    assert not [name for name in early if not name.startswith("train/")]


def test_nothing_in_the_runtime_unpickles():
    wrong = [str(found) for found in IMPORTS if found.module.split(".")[0] in UNPICKLERS]
    for path in sources():
        file, tree = read(path)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "torch.jit.load"):
                wrong.append(f"{file}:{node.lineno}: {ast.unparse(node)}")
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
                wrong.append(f"{file}:{node.value.lineno}: allow_pickle")
    assert not wrong


def test_files_are_short():
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text("utf-8").splitlines()) for path in sources()}
    lengths |= {
        path.relative_to(ROOT).as_posix(): len(path.read_text("utf-8").splitlines())
        for path in (ROOT / "tests").rglob("*.py")
    }
    assert not {file: length for file, length in lengths.items() if length > LONGEST_FILE}


def test_functions_are_short():
    long = []
    for path in sources():
        file, tree = read(path)
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno is not None:
                length = node.end_lineno - node.lineno + 1
                if length > LONGEST_FUNCTION:
                    long.append(f"{file}:{node.lineno}: {node.name} has {length} lines")
    assert not long


def test_every_module_says_what_it_offers():
    silent = []
    for path in sources():
        file, tree = read(path)
        names = {
            target.id
            for node in tree.body
            if isinstance(node, (ast.Assign, ast.AnnAssign))
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        }
        empty = all(isinstance(node, ast.Expr) for node in tree.body)
        if not empty and file not in ROOT_FILES and "__all__" not in names:
            silent.append(file)
        if not ast.get_docstring(tree):
            silent.append(f"{file}: no docstring")
    assert not silent


# The four traps of a checkout that is itself the package.


def test_the_root_holds_three_python_files():
    """Any other would ship in the wheel."""
    assert {path.name for path in ROOT.glob("*.py")} == ROOT_FILES


def test_every_subpackage_is_listed():
    """One that is not would be missing from the wheel, while an editable install finds it."""
    listed = _pyproject("packages")
    folders = {path.parent.relative_to(ROOT) for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    assert set(listed) == {"specedge"} | {".".join(("specedge", *folder.parts)) for folder in folders}
    for folder in folders:
        assert (ROOT / folder / "__init__.py").is_file(), f"{folder} has no __init__.py"


def test_every_data_file_is_listed():
    data = _pyproject("package-data")
    for room in (*ROOMS,):
        for path in (ROOT / room).rglob("*"):
            if path.is_file() and path.suffix not in (".py", ".pyc"):
                folders = [folder for folder in path.parents if folder.is_relative_to(ROOT)]
                patterns = [
                    f"{folder.relative_to(ROOT).as_posix()}/{pattern}"
                    for folder in folders
                    for pattern in data.get(".".join(("specedge", *folder.relative_to(ROOT).parts)), [])
                ]
                assert any(path.match(pattern) for pattern in patterns), f"{path} would not ship"


@pytest.mark.parametrize(
    ("code", "rule"),
    [
        ("import models\n\nprint(models)\n", "TID251"),
        ("from runtime.errors import SpecEdgeError\n\nprint(SpecEdgeError)\n", "TID251"),
        ("from .errors import SpecEdgeError\n\nprint(SpecEdgeError)\n", "TID252"),
        ("from specedge.runtime.errors import SpecEdgeError\n\nprint(SpecEdgeError)\n", None),
    ],
)
def test_ruff_refuses_a_second_copy_of_the_package(code, rule):
    """Run from the root, `import models` would find one."""
    pytest.importorskip("ruff")
    command = [sys.executable, "-m", "ruff", "check", "--output-format", "concise", "--stdin-filename", "runtime/x.py"]
    done = subprocess.run([*command, "-"], input=code, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (rule in done.stdout) if rule else done.returncode == 0, done.stdout


def _pyproject(key: str):
    tomllib = pytest.importorskip("tomllib")
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"][key]
