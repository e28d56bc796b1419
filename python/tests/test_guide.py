"""The Python code on the pages of `docs` runs.

Code after a line of three backticks and `python` runs, in its order on the page. Code that begins with a line such as
`# engine.py` is a file, which the page runs as a program. `python card` needs a card or another package: it compiles.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {str(path.relative_to(ROOT / "docs")): path.read_text() for path in sorted((ROOT / "docs").rglob("*.md"))}
FENCE = re.compile(r"^```python(?P<card> card)?\n(?P<code>.*?)^```", re.DOTALL | re.MULTILINE)
# Programs in files, and how the page starts them; each of a list runs beside the others.
PROGRAMS = {
    "tutorials/engines-that-sleep.md": [["engine.py", "trainer", "order.txt"], ["engine.py", "engine", "order.txt"]],
    "tutorials/more-than-the-card.md": [["sums.py"]],
    "sharing.md": [["share.py"]],
}


def blocks(page: str) -> list[tuple[str, str | None, bool]]:
    """Returns the code of a page, with the name of its file and whether it needs a card."""
    found = []
    for match in FENCE.finditer(PAGES[page]):
        name = re.match(r"# (\w+\.py)\n", match["code"])
        found.append((match["code"], name[1] if name else None, match["card"] is not None))
    return found


RUN = [page for page in PAGES if any(not card and not file for _, file, card in blocks(page))]


def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str) -> None:
    """Changes to a folder with the files of the page and the recordings that pages name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for code, file, _ in blocks(page):
        if file:
            (tmp_path / file).write_text(code)


def test_every_page_with_code_is_found() -> None:
    assert {"getting-started.md", "python.md", "tiers.md", "tutorials/out-of-memory.md"} <= set(RUN)
    assert len(RUN) >= 9, RUN
    fences = sum(len(re.findall(r"^```python", text, re.MULTILINE)) for text in PAGES.values())
    assert fences == sum(len(blocks(page)) for page in PAGES)


@pytest.mark.parametrize("page", RUN)
def test_the_programs_of_a_page_run_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    in_a_folder(tmp_path, monkeypatch, page)
    names: dict[str, object] = {}
    for code, file, card in blocks(page):
        if not file and not card:
            exec(compile(code, page, "exec"), names)


@pytest.mark.parametrize("page", PAGES)
def test_code_for_a_card_compiles(page: str) -> None:
    for code, _, card in blocks(page):
        if card:
            compile(code, page, "exec")


def test_every_file_of_a_page_is_run() -> None:
    files = {page: {file for _, file, _ in blocks(page) if file} for page in PAGES}
    started = {page: {command[0] for command in commands} for page, commands in PROGRAMS.items()}
    assert {page: names for page, names in files.items() if names} == started


@pytest.mark.parametrize("page", PROGRAMS)
def test_the_files_of_a_page_run_as_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str) -> None:
    in_a_folder(tmp_path, monkeypatch, page)
    started = [subprocess.Popen([sys.executable, *command]) for command in PROGRAMS[page]]
    assert [program.wait(120) for program in started] == [0] * len(started)
    if page == "tutorials/engines-that-sleep.md":
        order = (tmp_path / "order.txt").read_text().split("\n")[:-1]
        assert len(order) == 12
        for wakes, sleeps in zip(order[::2], order[1::2], strict=True):
            assert wakes.split()[0] == sleeps.split()[0], "one sleeps before the other wakes up"
            assert wakes.endswith("wakes up") and sleeps.endswith("sleeps")
