"""Build hook of wheels: compiles penstock._native where there is a C compiler. Otherwise the wheel is pure."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeBuildHook(BuildHookInterface[Any]):
    """Adds the extension to a wheel. For an editable install ``make setup`` compiles it beside the sources."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        spec = importlib.util.spec_from_file_location("native_build", Path(self.root) / "native" / "build.py")
        assert spec is not None
        assert spec.loader is not None
        native_build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(native_build)
        self._folder = tempfile.TemporaryDirectory()
        try:
            built = native_build.build(Path(self._folder.name))
        except native_build.CannotBuild as error:
            self.app.display_warning(f"penstock._native is not built; the wheel is pure Python: {error}")
            return
        build_data["force_include"][str(built)] = f"penstock/{built.name}"
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            self._folder.cleanup()
