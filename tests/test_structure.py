"""The package is what README says it is: these modules, in this order, each importing only from those before it."""

import ast
import re

from helpers.params import ROOT

PACKAGE = ROOT / "src" / "helpers"
TABLE = (ROOT / "README.md").read_text(encoding="utf-8").split("The modules of `helpers`")[1]
ORDER = re.findall(r"`([a-z_]+)`", TABLE.split("|---|---|")[1])


def imported(path):
    """Modules of the package that a file imports anywhere, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "helpers":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("helpers."):
            found.add(node.module.split(".")[1])
    return found & set(ORDER) - {path.stem}


def test_readme_names_every_module_once():
    assert sorted(ORDER) == sorted(p.stem for p in PACKAGE.glob("*.py") if p.stem != "__init__")


def test_each_module_imports_only_from_those_before_it():
    late = {name: imported(PACKAGE / f"{name}.py") - set(ORDER[: ORDER.index(name)]) for name in ORDER}
    assert {name: sorted(found) for name, found in late.items() if found} == {}


def test_no_module_knows_a_notebook():
    for path in PACKAGE.glob("*.py"):
        assert "notebooks/0" not in path.read_text(encoding="utf-8").replace("notebooks/{", ""), path.name
