"""The JavaScript of the viewer and the page against the types in its comments, by TypeScript's compiler."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from common.server.page.page import PAGE_PARTS, VIEWER_PARTS

ROOT = Path(__file__).resolve().parents[1]
TSC = ROOT / ".clients/typescript/node_modules/.bin/tsc"
VIEWER = ROOT / "common/server/page/viewer"
PAGE = ROOT / "common/server/page/chat_page"

# `strict` makes null a type of its own. Parameters without a type may be anything. All parts share one scope.
RULES = ("--allowJs", "--checkJs", "--noEmit", "--strict", "--noImplicitAny", "false")
TARGET = ("--moduleDetection", "legacy", "--target", "es2023", "--lib", "es2023,dom,dom.iterable")

pytestmark = pytest.mark.browser  # checks code for browsers, but needs no Chromium


def complaints(*scripts: Path) -> list[str]:
    if not TSC.is_file():
        pytest.skip("no TypeScript here: npm install --prefix .clients/typescript typescript@5")
    found = subprocess.run([TSC, *RULES, *TARGET, *scripts], capture_output=True, text=True, check=False)
    assert found.returncode in (0, 2), found.stderr  # 2: there are errors of types
    return found.stdout.splitlines()


def test_the_scripts_keep_their_types() -> None:
    viewer = [VIEWER / f"{part}.js" for part in VIEWER_PARTS]
    page = [PAGE / f"{part}.js" for part in PAGE_PARTS]
    assert complaints(*viewer, *page, ROOT / "docs/assets/stepper.js") == []


def test_a_wrong_type_is_found(tmp_path: Path) -> None:
    shutil.copytree(VIEWER, tmp_path, dirs_exist_ok=True)
    part = tmp_path / "viewer.js"
    part.write_text(part.read_text("utf-8").replace("this.moment = 0;", "this.moment = '0';", 1), "utf-8")
    assert any(
        "viewer.js" in line for line in complaints(*(tmp_path / f"{each}.js" for each in VIEWER_PARTS))
    )
