"""``make setup`` installs and runs only what is pinned by its hash."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCKS = ["requirements-build.lock", "requirements.lock", "requirements-java.lock"]


def locked(name):
    """Version and hashes of each package of a lock file."""
    text = (ROOT / name).read_text()
    found = re.findall(
        r"^([a-z0-9._-]+)==(\S+)[^\n]*\\\n((?:    --hash=sha256:[0-9a-f]{64}[ \\]*\n?)+)", text, re.M
    )
    assert len(found) == len(re.findall(r"^[a-z]", text, re.M)), "every line that names a package has a hash"
    return {package: version for package, version, _ in found}


def recipe():
    """The commands that make the environment, with the variables in place."""
    text = (ROOT / "Makefile").read_text()
    variables = dict(re.findall(r"^(\w+) := (.*)$", text, re.M))
    lines = re.search(r"^\.venv/ready:.*\n((?:\t.*\n|#.*\n)+)", text, re.M)[1]
    for _ in variables:
        lines = re.sub(r"\$\((\w+)\)", lambda found: variables.get(found[1], found[0]), lines)
    return lines


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_is_pinned_with_hashes(name):
    assert locked(name)


def test_every_installation_checks_hashes_or_takes_nothing_from_an_index():
    installs = [line for line in recipe().splitlines() if "pip" in line and " install --quiet" in line]
    assert len(installs) == 4
    for line in installs:
        assert "--require-hashes --only-binary :all:" in line or "--no-index --no-deps" in line, line


def test_what_is_built_from_source_is_built_by_pinned_tools():
    builds = [line for line in recipe().splitlines() if "--no-binary" in line or " -e ." in line]
    assert len(builds) == 2
    assert all("--no-build-isolation" in line for line in builds), "isolation fetches the newest tools, unpinned"
    lines = recipe().splitlines()
    order = [line for line in lines if "pip" in line and " install --quiet" in line]
    assert "requirements-build.lock" in order[0], "the tools come first"
    tools = locked("requirements-build.lock")
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert {"pip", "setuptools", "wheel", "editables", *wanted} <= tools.keys()


def test_the_locks_agree():
    build, rest = locked("requirements-build.lock"), locked("requirements.lock")
    assert {name: version for name, version in build.items() if rest.get(name, version) != version} == {}


def test_changed_locks_renew_the_environment():
    needs = re.search(r"^\.venv/ready:(.*)$", (ROOT / "Makefile").read_text(), re.M)[1].split()
    assert {*LOCKS, "pyproject.toml"} <= set(needs)
