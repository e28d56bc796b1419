"""The programs in `docs/python.md` run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "python.md"


def test_the_programs_of_the_guide_run_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    programs = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert len(programs) >= 8
    names: dict[str, object] = {}
    for program in programs:
        exec(compile(program, str(GUIDE), "exec"), names)
