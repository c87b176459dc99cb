"""Jars of the servers that tests start, fetched once with Maven into the user's cache."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import EnvironmentFault
from penstock.spark.java import ensure_java

Progress = Callable[[str], None]

_POM = """<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>penstock</groupId> <artifactId>for-tests</artifactId> <version>1</version>
  <packaging>pom</packaging>
  <dependencies>
{dependencies}
  </dependencies>
</project>
"""
_DEPENDENCY = "<dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version></dependency>"
_COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy-dependencies"


@dataclass(frozen=True)
class JavaProduct:
    """A Java program on Maven Central, with its dependencies."""

    title: str
    version: str
    artifacts: tuple[str, ...]
    """Each as ``group:artifact:version``; their dependencies are fetched too."""

    def jars(self, progress: Progress = lambda line: None) -> Path:
        """The folder with the jars in the user's cache, filled on first use. Several processes may call this at
        once: one fetches, the others wait."""
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"
        home = cache / f"{self.title.lower()}-{self.version}"
        if home.exists():
            return home
        maven = shutil.which("mvn")
        if maven is None:
            raise EnvironmentFault(
                f"{self.title} for tests",
                f"Apache Maven (mvn), which fetches {self.title} on first use, is not on the PATH",
                f"Install it (on Debian: apt-get install maven), or use your own {self.title}.",
            )
        cache.mkdir(parents=True, exist_ok=True)
        with open(cache / f"{home.name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not home.exists():
                self._fetch(maven, home, progress)
        return home

    def _fetch(self, maven: str, home: Path, progress: Progress) -> None:
        """Fetch into a folder beside ``home`` and rename it at the end, so that a folder of that name is always
        complete."""
        with tempfile.TemporaryDirectory(prefix=f"{home.name}.part-", dir=home.parent) as part:
            pom, libraries = Path(part) / "pom.xml", Path(part) / "lib"
            wanted = (_DEPENDENCY.format(*artifact.split(":")) for artifact in self.artifacts)
            pom.write_text(_POM.format(dependencies="\n".join(wanted)))
            copy = [_COPY, f"-DoutputDirectory={libraries}", "-DincludeScope=runtime"]
            progress(f"fetching {self.title} {self.version} with Maven (only once) ...")
            output: list[str] = []
            files = 0
            with subprocess.Popen(
                [maven, "-B", "-f", str(pom), *copy],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "JAVA_HOME": ensure_java()},
            ) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    output.append(line.strip())
                    if "Downloaded from" in line:
                        files += 1
                        progress(f"fetching {self.title} {self.version}: {files} files")
            if process.returncode:
                reasons = [line for line in output if line.startswith("[ERROR]")] or output
                raise EnvironmentFault(
                    f"{self.title} for tests",
                    f"Maven could not fetch {self.title} "
                    f"({reasons[0] if reasons else f'exit code {process.returncode}'})",
                    "Maven needs access to Maven Central or to a mirror named in its settings.xml.",
                )
            libraries.rename(home)
