"""The programs in `docs/python.md` and `docs/python-deferrable.md` run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(("page", "least"), [("python.md", 8), ("python-deferrable.md", 5)])
def test_the_programs_of_the_guide_run_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str, least: int
) -> None:
    monkeypatch.chdir(tmp_path)
    programs = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert len(programs) >= least
    names: dict[str, object] = {}
    for program in programs:
        exec(compile(program, page, "exec"), names)
