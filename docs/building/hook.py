"""What the site has that lies nowhere below `docs`: the viewer, as servers have it, and the stepper's traces."""

from __future__ import annotations

import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # mkdocs loads this file by itself, before it loads macros

from common.server import viewer  # noqa: E402 - needs the path
from docs.building import stepper  # noqa: E402


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, content in (("viewer.js", viewer.script()), ("viewer.css", viewer.style())):
        files.append(File.generated(config, f"assets/{name}", content=content))
    for setting in stepper.settings():
        files.append(
            File.generated(config, f"assets/steps/{setting.name}.js", content=stepper.script(setting))
        )
    return files
