"""Programs from Debian packages for tests, without root: found on the PATH, or unpacked once into the user's
cache."""

from __future__ import annotations

import fcntl
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import EnvironmentFault
from penstock.testing.servers.jars import Progress

# All libraries except the C library: one that does not match the dynamic loader of this machine breaks every
# program.
_LIBRARY = re.compile(r"^ *\|?Depends: (lib(?!c6\b)[\w.+-]+)", re.M)


@dataclass(frozen=True)
class DebianProgram:
    """A program and the packages that contain it. Required libraries are fetched too."""

    name: str
    packages: tuple[str, ...]

    def command(self, progress: Progress = lambda line: None) -> list[str]:
        """The first words of a command line that runs the program. They replace themselves with the program by
        exec, so its process id is that of the started process. If the program is not installed, it is fetched on
        first use. Several processes may call this at once: one fetches, the others wait."""
        if installed := shutil.which(self.name):
            return [installed]
        self._check_tools()
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"
        system = platform.freedesktop_os_release()
        home = cache / "-".join([self.name, system["ID"], system.get("VERSION_ID", "any"), platform.machine()])
        if not home.exists():
            cache.mkdir(parents=True, exist_ok=True)
            with open(cache / f"{home.name}.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not home.exists():
                    self._fetch(home, progress)
        return self._run_in(home)

    def _check_tools(self) -> None:
        missing = [tool for tool in ("apt-get", "apt-cache", "dpkg") if shutil.which(tool) is None]
        if missing:
            raise self._fault(
                f"{self.name} is not installed, and neither is {missing[0]}, which is needed to fetch it"
            )

    def _fetch(self, home: Path, progress: Progress) -> None:
        """Unpack beside ``home`` and rename at the end, so that a folder of that name is always complete.
        Libraries that this machine lacks are taken from the dependencies of the packages, then from their
        dependencies, and so on."""
        with tempfile.TemporaryDirectory(prefix=f"{home.name}.part-", dir=home.parent) as part:
            folder, root = Path(part), Path(part) / "root"
            wanted, fetched = list(self.packages), set(self.packages)
            progress(f"fetching {self.name} from Debian (only once) ...")
            options = self._download(folder, wanted)
            while True:
                for package in folder.glob("*.deb"):
                    self._run("dpkg", "-x", str(package), str(root))
                    package.unlink()
                missing = self._missing_libraries(root)
                if not missing:
                    break
                named = self._run("apt-cache", *options, "depends", "--important", *wanted)
                wanted = sorted(set(_LIBRARY.findall(named)) - fetched)
                if not wanted:
                    raise self._fault(f"Debian's packages do not contain {', '.join(missing)}")
                fetched.update(wanted)
                self._download(folder, wanted, options)
            root.rename(home)

    def _download(self, folder: Path, packages: Sequence[str], options: Sequence[str] | None = None) -> list[str]:
        """Fetch packages with the given apt options. Without options, find options that work and return them: none
        if apt has package lists, otherwise options for package lists in this folder."""
        if options is not None:
            self._run("apt-get", *options, "download", *packages, folder=folder)
            return list(options)
        try:
            return self._download(folder, packages, [])
        except EnvironmentFault:
            own = [f"Dir::State::lists={folder}/lists", f"Dir::Cache={folder}/cache", "APT::Sandbox::User="]
            options = [word for setting in own for word in ("-o", setting)]
            (folder / "lists" / "partial").mkdir(parents=True)
            (folder / "cache" / "archives" / "partial").mkdir(parents=True)
            self._run("apt-get", *options, "update")
            return self._download(folder, packages, options)

    def _missing_libraries(self, root: Path) -> list[str]:
        found = self._run("env", *self._run_in(root)[1:-1], "ldd", self._run_in(root)[-1])
        return re.findall(r"(\S+) => not found", found)

    def _run_in(self, root: Path) -> list[str]:
        libraries = sorted({str(path.parent) for path in root.glob("**/lib*.so*")})
        return ["env", f"LD_LIBRARY_PATH={':'.join(libraries)}", str(root / "usr" / "bin" / self.name)]

    def _run(self, *command: str, folder: Path | None = None) -> str:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}, check=False
        )
        if done.returncode:
            output = (done.stderr or done.stdout).strip().splitlines()
            errors = [line for line in output if line.startswith("E:")] or output[-1:]
            raise self._fault(
                f"'{' '.join(command[:1])}' failed ({errors[0] if errors else f'exit code {done.returncode}'})"
            )
        return done.stdout

    def _fault(self, problem: str) -> EnvironmentFault:
        return EnvironmentFault(
            f"{self.name} for tests", problem, f"Install it (on Debian: apt-get install {self.packages[0]})."
        )
