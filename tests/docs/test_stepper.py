"""The stepper in a real browser, in a site opened from disk: steps, settings, keys, phones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.startup.phases import find_phase, phase_names
from docs.building import stepper
from tests.support.browser import DESKTOP, PHONE, Tab

browser = pytest.mark.browser


# ---------------------------------------------------------------------- what is drawn


def test_every_setting_of_the_sliders_has_its_trace_and_no_two_share_a_name() -> None:
    settings = stepper.settings()
    assert len({setting.name for setting in settings}) == len(settings)
    assert {setting.phase for setting in settings} == set(range(4, 4 + len(phase_names())))


@pytest.mark.parametrize("phase", range(4, 10))
@pytest.mark.parametrize("story", stepper.STORIES)
def test_a_story_ends_for_everybody(phase: int, story: str) -> None:
    """Every request ends, even with the smallest memory of the sliders."""
    setting = stepper.Setting(phase, 2, min(stepper.BLOCKS), min(stepper.CHUNKS), story)
    frames = stepper.trace(setting)["frames"]
    ended = [number for frame in frames for number, reason in frame.get("ended", ())]
    assert sorted(ended) == list(range(len(stepper.STORIES[story].clients)))
    assert frames[-1]["running"] == []
    last = [frame for frame in frames if "ended" in frame][-1]
    ends = [frame["start"] + frame["took"] for frame in (last, frames[-1])]
    assert ends[0] == pytest.approx(ends[1]), "the end of the last step is the score"


def test_the_stories_show_what_their_page_says() -> None:
    def frames(phase: int, story: str, **changes: int) -> list[dict]:
        values = {"seats": 4, "blocks": 40, "chunk": 16} | changes
        return stepper.trace(stepper.Setting(phase, story=story, **values))["frames"]

    def kinds(found: list[dict]) -> set[str]:
        return {row[3] for frame in found for row in frame["running"]}

    assert "i" in kinds(frames(4, "mixed"))
    assert "i" not in kinds(frames(5, "mixed"))
    assert any("preempted" in frame for frame in frames(6, "crowd", seats=8, blocks=24))
    widest = {phase: max(f["took"] for f in frames(phase, "long")) for phase in (6, 7)}
    usual = sorted(frame["took"] for frame in frames(6, "long"))
    assert widest[6] > 5 * usual[len(usual) // 2]
    assert widest[7] < 2 * usual[len(usual) // 2]
    assert any("found" in frame for frame in frames(8, "prefix"))
    assert not any("found" in frame for frame in frames(7, "prefix"))


# ---------------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def page(site: Path) -> str:
    return (site / "stepper.html").as_uri()


def step_of(tab: Tab, panel: int = 0) -> int:
    said = tab.ask(f"document.querySelectorAll('.sv-head span')[{panel}].textContent")
    return int(said.split(",")[0].removeprefix("step "))


def opened(tab: Tab, url: str, **how: bool | int) -> None:
    tab.open(url, **how)  # type: ignore[arg-type]  # arguments of `open`
    tab.until("document.querySelectorAll('.sv-time svg').length === 2")


@browser
def test_buttons_keys_and_slider_step(tab: Tab, page: str, site: Path) -> None:
    opened(tab, page)
    assert (step_of(tab), step_of(tab, 1)) == (0, 0)
    tab.point("[data-do=on]", click=True)
    assert step_of(tab) + step_of(tab, 1) == 1, "both show the same time, and one has got further in it"
    assert "step 1." in tab.ask("document.querySelector('.sv-said').textContent")
    tab.ask("document.querySelector('.sv-chip').focus()")
    tab.press("ArrowRight")
    assert step_of(tab) + step_of(tab, 1) > 1
    tab.press("End")
    last = [step_of(tab), step_of(tab, 1)]
    assert min(last) > 20
    tab.press("ArrowLeft")
    assert [step_of(tab), step_of(tab, 1)] != last
    tab.press("Home")
    assert step_of(tab) == 0
    tab.ask("document.querySelector('.sv-controls input').focus()")
    tab.press("ArrowRight")
    assert tab.ask("document.activeElement.value") == "1"
    assert tab.ask("document.activeElement.getAttribute('aria-valuetext')").startswith("step ")
    tab.assert_well(site.as_uri())


@browser
def test_it_plays_and_pauses_and_ends_at_the_end(tab: Tab, page: str) -> None:
    opened(tab, page, still=True)
    assert tab.ask("document.querySelector('[data-do=play]').ariaLabel") == "play"
    tab.point("[data-do=play]", click=True)
    tab.until("document.querySelector('.sv-controls input').value > 2")
    assert tab.ask("document.querySelector('[data-do=play]').ariaLabel") == "pause"
    tab.point("[data-do=play]", click=True)
    stopped = tab.ask("document.querySelector('.sv-controls input').value")
    assert tab.ask("new Promise(r => setTimeout(r, 900, document.querySelector('input').value))")
    assert tab.ask("document.querySelector('.sv-controls input').value") == stopped
    tab.ask("document.querySelector('.sv-speed select').value = 4")
    tab.press("End")
    tab.press("ArrowLeft")
    tab.point("[data-do=play]", click=True)
    tab.until("document.querySelector('[data-do=play]').ariaLabel === 'play'")
    assert tab.ask("(e => e.value === e.max)(document.querySelector('.sv-controls input'))")


@browser
def test_the_settings_choose_what_is_shown(tab: Tab, page: str, site: Path) -> None:
    opened(tab, page)
    tab.ask(
        "(form => { form.elements.left.value = 6; form.elements.right.value = 9; form.elements.blocks.value = 0;"
        " form.elements.seats.value = 2; form.elements.chunk.value = 1; form.elements.story.value = 'crowd';"
        " form.dispatchEvent(new Event('input')); })(document.querySelector('form.stepper-settings'))"
    )
    tab.until("document.querySelector('.sv-head strong').textContent === 'Phase 6: paged attention'")
    assert tab.ask("document.querySelectorAll('.sv-head strong')[1].textContent") == (
        "Phase 9: pipelined decoding"
    )
    assert tab.ask("document.querySelectorAll('.sv-panel:first-child .sv-lane').length") == 8
    assert "of 24 blocks" in tab.ask("document.querySelector('.sv-memory-head').textContent")
    loaded = [each for each in tab.requested if "/steps/" in each]
    assert any(each.endswith("p6-s8-b24-crowd.js") for each in loaded)
    assert any(each.endswith("p9-s8-b24-c64-crowd.js") for each in loaded)
    assert len(loaded) == 4, "what was shown first, and what is shown now"
    tab.assert_well(site.as_uri())


def score(*phases: int, **changes: int | str) -> str:
    """Return the sentence below the viewer, computed from the same traces."""
    ends = []
    for phase in phases:
        values: dict[str, Any] = {"seats": 4, "blocks": 40, "chunk": 16, "story": "mixed"} | changes
        frames = stepper.trace(stepper.Setting(phase, **values))["frames"]
        ends.append((round((frames[-1]["start"] + frames[-1]["took"] - frames[0]["start"]) * 1000), phase))
    return f"All requests are done {', '.join(f'in phase {phase} at {ms} ms' for ms, phase in sorted(ends))}."


SAID = "document.querySelector('.stepper-score span').textContent"
SETTINGS = (
    "['left', 'right', 'story', 'seats'].map(name => document.querySelector(`.stepper [name=${name}]`).value)"
)


@browser
def test_it_ends_with_its_score_and_a_link_keeps_the_settings(tab: Tab, page: str, site: Path) -> None:
    opened(tab, page)
    assert tab.until(SAID) == score(4, 5)
    tab.ask(
        "(form => { form.elements.left.value = 8; form.elements.right.value = 6; form.elements.seats.value = 2;"
        " form.elements.story.value = 'prefix'; form.dispatchEvent(new Event('input')); })"
        "(document.querySelector('form.stepper-settings'))"
    )
    expected = score(8, 6, story="prefix", seats=8)
    tab.until(f"{SAID} === {expected!r}")
    link = tab.ask("document.querySelector('.stepper-score a').href")
    assert link == page + "#left=8&right=6&story=prefix&seats=8&blocks=40&chunk=16"
    assert tab.ask("location.href") == link
    opened(tab, link)
    assert tab.until(SAID) == expected
    assert tab.ask(SETTINGS) == ["8", "6", "prefix", "2"]
    tab.ask("location.hash = '#left=7'")
    tab.until(f"{SAID} === {score(7, 6, story='prefix', seats=8)!r}")
    tab.assert_well(site.as_uri())


@browser
def test_a_link_with_unknown_settings_changes_nothing(tab: Tab, page: str, site: Path) -> None:
    opened(tab, page + "#left=12&story=%3Cb%3E&seats=3&nobody=1&left=")
    assert tab.until(SAID) == score(4, 5)
    assert tab.ask(SETTINGS) == ["4", "5", "mixed", "1"]
    tab.assert_well(site.as_uri())


@browser
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_can_be_read_everywhere(tab: Tab, page: str, site: Path, width: int, dark: bool) -> None:
    opened(tab, page, width=width, dark=dark)
    for _ in range(12):
        tab.ask("document.querySelector('[data-do=on]').click()")
    assert tab.ask("document.documentElement.scrollWidth") <= width
    tab.assert_well(site.as_uri())
    assert tab.violations(".stepper") == []


@browser
@pytest.mark.parametrize("phase", [None, *range(5, 10)])
def test_a_phases_page_has_it_beside_the_phase_before_and_so_has_the_first_page(
    tab: Tab, site: Path, phase: int | None
) -> None:
    name = (
        "what-a-server-does" if phase is None else f"phases/{find_phase(phase).PHASE.slug.partition('_')[2]}"
    )
    opened(tab, (site / f"{name}.html").as_uri(), width=PHONE)
    phase = phase or 5
    chosen = [tab.ask(f"document.querySelector('[name={side}]').value") for side in ("left", "right")]
    assert chosen == [str(phase - 1), str(phase)]
    assert tab.ask("document.documentElement.scrollWidth") <= PHONE
    tab.assert_well(site.as_uri())


@browser
def test_an_id_cannot_be_markup(tab: Tab, page: str) -> None:
    opened(tab, page)
    frame = {
        "step": 0,
        "start": 0,
        "took": 1,
        "key": True,
        "memory": [4, 4],
        "running": [[0, 0, 3, "p", 0, 3, 0]],
    }
    frame |= {"tables": [[0, 0, 1]], "requests": [[0, "<img/src=x/onerror=document.title=1>", 3, 3]]}
    header = {"format": "infer-steps", "version": 1, "phase": [6, "x"], "seats": 2, "max_seq_len": 9}
    trace = json.dumps({"header": header, "frames": [frame]})
    tab.ask(
        f"(v => {{ v.show([{trace}]); v.light(0); }})(new StepViewer(document.querySelector('.steps-viewer')))"
    )
    assert "onerror" in tab.ask("document.querySelector('.sv-about').textContent")
    assert tab.ask("document.querySelectorAll('.steps-viewer img').length") == 0
