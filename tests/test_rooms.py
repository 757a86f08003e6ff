"""Which room may import what: imports go down only."""

import ast
from pathlib import Path

import pytest

import lightning_fsdp_toy

PACKAGE = Path(lightning_fsdp_toy.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
SHARDING = sorted((PACKAGE / "sharding").rglob("*.py"))
MODELS = sorted((PACKAGE / "models").rglob("*.py"))


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in {path}"
            names.add(node.module or "")
    return names


def third_party(path: Path) -> set[str]:
    import sys

    return {name.split(".")[0] for name in imported(path)} - set(sys.stdlib_module_names)


@pytest.mark.parametrize("path", SHARDING, ids=lambda p: p.name)
def test_sharding_imports_torch_and_itself(path):
    assert third_party(path) <= {"torch", "lightning_fsdp_toy"}
    ours = {name for name in imported(path) if name.startswith("lightning_fsdp_toy")}
    assert all(name.startswith("lightning_fsdp_toy.sharding") for name in ours)


@pytest.mark.parametrize("path", MODELS, ids=lambda p: p.name)
def test_models_do_not_know_that_they_are_sharded(path):
    assert third_party(path) <= {"torch", "lightning_fsdp_toy"}
    ours = {name for name in imported(path) if name.startswith("lightning_fsdp_toy")}
    assert all(name.startswith("lightning_fsdp_toy.models") for name in ours)


def test_layout_is_integers_only():
    assert third_party(PACKAGE / "sharding" / "layout.py") == set()


def test_hydra_is_imported_at_the_entrance_only():
    users = {path.name for path in FILES if third_party(path) & {"hydra", "omegaconf"}}
    assert users <= {"launch.py", "jobs.py"}


def test_files_stay_readable():
    lengths = {path: len(path.read_text().splitlines()) for path in FILES}
    assert {path.name: n for path, n in lengths.items() if n > 370} == {}
