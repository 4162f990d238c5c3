"""The package as a whole: light to import, exact public names, imports in one direction."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import megatron_packed_sft
from megatron_packed_sft import errors

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megatron_packed_sft"
MODULES = sorted(PACKAGE.rglob("*.py"))

# architecture.md: what each room may import of ours. errors, plugins, support and the version are open to all.
ALLOWED = {
    "support": set(),
    "remote": set(),
    "records": {"remote"},  # inputs may be URLs
    "encode": {"records", "remote"},  # the types of records; tokenizers and templates may be URLs
    "config": set(),
    "packing": {"remote"},  # a plan's file is published like everything else
    "storage": {"remote"},
    "tokens": {"remote", "storage", "packing"},  # a token store and a plan become shards
    "data": {"records", "encode", "tokens", "packing", "storage", "remote"},
    "megatron": {"records", "encode", "tokens", "packing", "storage", "data"},
    "caches": {"records", "encode", "storage", "config"},
    "prepare": {"records", "encode", "tokens", "packing", "storage", "remote", "data", "config"},
    "train": {"records", "encode", "tokens", "packing", "storage", "remote", "data", "megatron", "config"},
    # All but megatron and train: what those leave on disk is described by its JSON files.
    "inspect": {"records", "encode", "tokens", "packing", "storage", "remote", "data", "prepare", "config"},
    "cli": {
        *("records", "encode", "tokens", "packing", "storage", "remote", "data"),
        *("megatron", "caches", "prepare", "train", "inspect"),
    },
}
# Packages that only some rooms may touch, because they are heavy or belong there.
ONLY_IN = {
    "torch": {"caches", "data", "megatron", "train"},
    "megatron": {"megatron", "train"},
    "safetensors": {"megatron"},
    "transformers": {"encode"},
    "tokenizers": {"encode"},
    "gigatoken": {"encode"},
    "sentencepiece": {"encode"},
    "jinja2": {"encode"},
    "datasets": {"records"},
    "wandb": {"train"},
    "mlflow": {"train"},
    "ray": {"prepare"},
    "hydra": {"config"},
    "omegaconf": {"config"},
    "click": {"cli"},
    "rich": {"support", "prepare", "inspect", "cli"},
}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the whole name"
            assert node.module is not None
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_importing_the_package_loads_nothing_but_itself_and_the_standard_library() -> None:
    script = (
        "import sys; before = set(sys.modules); import megatron_packed_sft; "
        "print(*(name for name in sys.modules if name not in before))"
    )
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert {name for name in loaded if name.split(".")[0] not in sys.stdlib_module_names} == {
        "megatron_packed_sft",
        "megatron_packed_sft._version",
    }
    assert len(loaded) < 60, "importing the package got slow; load what is heavy when it is first used"


def test_all_is_exact_and_every_public_name_loads() -> None:
    homes = megatron_packed_sft._HOMES
    assert megatron_packed_sft.__all__ == sorted({*homes, "__version__"})
    assert len(megatron_packed_sft.__all__) <= 45, "the root has what users type; the rest has its documented module"
    for name, home in homes.items():
        module = importlib.import_module(f"megatron_packed_sft.{home}")
        assert getattr(megatron_packed_sft, name) is getattr(module, name)
        assert getattr(module, name).__module__ == module.__name__, f"{name} is defined elsewhere"
    public = {
        name
        for name, value in vars(megatron_packed_sft).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert public - {"annotations", "Any", "TYPE_CHECKING", "cast"} <= set(megatron_packed_sft.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = megatron_packed_sft.nonsense


def test_type_checkers_see_the_same_names_as_users() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    [guarded] = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.asname: node.module.removeprefix("megatron_packed_sft.")
        for node in guarded.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    assert seen == megatron_packed_sft._HOMES


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    room = room_of(path)
    if room == "__init__" or path.name == "__main__.py":  # what is run sits on top of everything
        return
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] == "megatron_packed_sft":
            target = parts[1]
            if target not in {room, "errors", "plugins", "support", "_version", "__version__"}:
                assert target in ALLOWED.get(room, set()), f"{path} imports {name}"
        elif parts[0] in ONLY_IN:
            assert room in ONLY_IN[parts[0]], f"{path} imports {name}"


def test_the_error_tree_in_the_docstring_is_the_real_one() -> None:
    drawn = re.findall(r"\b(\w+Error)\b", errors.__doc__ or "")
    real = [name for name, value in vars(errors).items() if isinstance(value, type)]
    assert {name for name in drawn if hasattr(errors, name)} == set(real)
    for name in real:
        assert issubclass(getattr(errors, name), errors.PackedSFTError)


def test_every_public_function_and_class_has_a_docstring() -> None:
    missing = []
    for path in MODULES:
        module = ast.parse(path.read_text())
        classes = [node for node in module.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
        for node in [*module.body, *(inner for one in classes for inner in one.body)]:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            if not ast.get_docstring(node):
                missing.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert missing == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_private_module_of_another_package_is_imported(path: Path) -> None:
    for name in imports_of(path):
        package, *parts = name.split(".")
        private = [part for part in parts if part.startswith("_") and not part.startswith("__")]
        assert package in ("megatron_packed_sft", "__future__") or not private, f"{path} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_private_modules_are_imported_only_beside_them(path: Path) -> None:
    here = path.parent.relative_to(ROOT).parts
    for name in imports_of(path):
        parts = name.split(".")
        for depth, part in enumerate(parts):
            if parts[0] == "megatron_packed_sft" and part.startswith("_") and part not in ("_version", "__version__"):
                assert here[:depth] == tuple(parts[:depth]), f"{path} imports {name}, private to another room"


def test_no_test_asserts_seconds() -> None:
    """Speed is measured by benchmarks/, as ratios within one run; a busy machine must not fail the tests."""
    clocks = {"perf_counter", "monotonic", "process_time", "perf_counter_ns", "monotonic_ns"}
    offending = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
                continue
            called = {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}
            text = ast.unparse(node)
            if called & clocks and not re.search(r"while .*(perf_counter|monotonic)", text):
                offending.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert offending == []
