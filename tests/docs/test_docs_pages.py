"""What the pages say exists: links, files, names, the journey of one batch."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from docs_pages import PAGES, ROOT, blocks, name_of

README = ROOT / "README.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


def resolve(dotted: str) -> Any:
    """`rl_lab.a.b.Name.method`: the longest importable beginning, then attributes."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[length:]:
            found = getattr(found, attribute)
        return found
    raise AssertionError(f"{dotted} cannot be imported")


def slugs(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@every_page
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([\w-]+))?\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        destination = page.parent / target if target else page
        assert destination.exists(), f"{name_of(page)} links to {target}, which does not exist"
        if anchor:
            assert anchor in slugs(destination), f"{name_of(page)} links to {target}#{anchor}: no such heading"


@every_page
def test_every_name_on_a_page_can_be_imported(page: Path) -> None:
    for dotted in sorted(set(re.findall(r"(?<![\w/.])rl_lab(?:\.\w+)+", page.read_text()))):
        resolve(dotted)


@every_page
def test_every_file_named_on_a_page_exists(page: Path) -> None:
    for path in re.findall(
        r"`((?:rl_lab|examples|docs|tests|scripts|benchmarks)/[\w/-]*(?:/|\.\w+))`", page.read_text()
    ):
        assert (ROOT / path).exists(), f"{name_of(page)} names {path}, which does not exist"


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        if page.name != "README.md":
            assert f"({page.relative_to(ROOT / 'docs').as_posix()})" in index, (
                f"docs/README.md does not list {page.name}"
            )


def test_the_readme_is_short_and_opens_with_two_commands() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= 120
    first = [line.split("#")[0].strip() for line in blocks(README, "bash")[0].splitlines()]
    assert first == ["make train", "make test"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{command.split()[1]}:", makefile, re.MULTILINE) for command in first)
    assert text.index("make test") < text.index("live.svg") < text.index("##")


def test_the_picture_needs_no_other_host() -> None:
    picture = (ROOT / "docs" / "images" / "live.svg").read_text()
    assert picture.lstrip().startswith("<svg") and "CartPole-v1" in picture
    assert re.findall(r"url\(\W?http|href=", picture) == []


# --- the journey of one batch ------------------------------------------------------------------


def journey() -> list[tuple[str, str, str]]:
    """(number, file, dotted name) of each stop; an empty cell repeats the one above."""
    section = ARCHITECTURE.read_text().partition("## The journey of one batch")[2].partition("\n## ")[0]
    stops = []
    number = file = ""
    for line in section.splitlines():
        match = re.match(r"\|\s*(\d*)\s*\|\s*([^|]*?)\s*\|\s*`([\w.]+)`", line)
        if match is None:
            continue
        number = match[1] or number
        file = match[2].strip("`") if match[2].startswith("`") else file if not match[2] else ""
        stops.append((number, file, match[3]))
    return stops


def test_the_journey_passes_through_eight_files() -> None:
    assert {number for number, _, _ in journey()} == {str(number) for number in range(1, 9)}
    assert len({file for _, file, _ in journey() if file}) == 8


@pytest.mark.parametrize("stop", journey(), ids=lambda stop: stop[2])
def test_every_stop_of_the_journey_lies_in_its_file(stop: tuple[str, str, str]) -> None:
    _, file, dotted = stop
    source = Path(inspect.getsourcefile(inspect.unwrap(resolve(dotted))) or "")  # the formula, not its fast path
    assert not file or source.as_posix().endswith(file), f"{dotted} lies in {source}, not in {file}"


def test_the_journey_is_short_to_read() -> None:
    lines = sum(len(inspect.getsource(resolve(dotted)).splitlines()) for dotted in {stop[2] for stop in journey()})
    assert lines <= 1300


def test_the_first_page_says_how_long_to_train_and_how_to_see_the_curves() -> None:
    page = (ROOT / "README.md").read_text()
    for words in ("total_timesteps=1e5", "tensorboard --logdir runs", "rl-lab resume @last"):
        assert f"{words}`" in page, f"README.md no longer says {words}"
