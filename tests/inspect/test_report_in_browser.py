"""The page in a real browser: no complaints, both themes, two widths, and everything that can be clicked."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megatron_packed_sft.inspect.report.write import write_report
from megatron_packed_sft.storage.dataset_directory import DatasetWriter
from tests.inspect.browser import DESKTOP, PHONE, chromium, open_page
from tests.inspect.conftest import HOSTILE, LONG_TEXT, Prepared
from tests.inspect.test_report_page import write_run
from tests.packed_bins import make_bins

THEMES = pytest.mark.parametrize("scheme", ["light", "dark"])
_TEXT_FROM = """
    (one) => {
        let text = "";
        for (let number = 0; number < 12 && one; number++, one = one.nextSibling) text += one.textContent;
        return text;
    }
"""
_IS_IN_VIEW = """
    (one) => { const box = one.getBoundingClientRect(); return box.top > 0 && box.bottom < innerHeight; }
"""
_UNLABELLED = """
    [...document.querySelectorAll("input, select, button")]
        .filter((one) => !one.labels?.length && !one.textContent.trim()).map((one) => one.id)
"""
_CONTRAST = Path(__file__).with_name("contrast.js").read_text()
VIEWPORTS = {"desktop": DESKTOP, "phone": PHONE}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def page(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the dataset with hostile chats."""
    return Path(write_report(prepared.path, tmp_path_factory.mktemp("page") / "report.html").path)


@pytest.fixture(scope="module")
def run_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run."""
    home = tmp_path_factory.mktemp("run")
    return Path(write_report(write_run(home / "first"), home / "run.html").path)


@pytest.fixture(scope="module")
def plain_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of two splits without a tokenizer."""
    home = tmp_path_factory.mktemp("plain")
    with DatasetWriter(home / "ids_only") as dataset:
        for split, num_bins in (("train", 30), ("validation", 4)):
            with dataset.shard_writer(split, 0, num_bins=num_bins, pack_size=64) as writer:
                for number, one in enumerate(make_bins(num_bins, 64, seed=num_bins)):
                    writer.write_bin(number, *one)
                writer.finalize()
        dataset.finalize()
    return Path(write_report(home / "ids_only", home / "report.html").path)


@pytest.mark.parametrize("which", ["page", "run_page", "plain_page"])
@pytest.mark.parametrize(("scheme", "name"), [("light", "desktop"), ("dark", "phone")])
def test_a_page_opens_from_disk_in_both_themes_and_on_a_phone(
    browser: Any, which: str, scheme: str, name: str, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(which)
    with open_page(browser, path, scheme=scheme, viewport=VIEWPORTS[name]) as tab:
        tab.page.wait_for_selector(".chart canvas")
        for chart in tab.page.query_selector_all(".chart"):
            chart.scroll_into_view_if_needed()
        assert len(tab.page.query_selector_all(".chart canvas")) == len(tab.page.query_selector_all(".chart"))
        assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out"
        background = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}[scheme]
        tab.page.evaluate("scrollTo(0, 0)")
        tab.screenshot(f"{which}_{scheme}_{name}", full=which != "page")


def test_next_and_previous_go_through_the_bins_and_the_address_follows(browser: Any, plain_page: Path) -> None:
    with open_page(browser, plain_page) as tab:
        assert tab.text("#bin-summary").startswith("Bin 0: ")
        assert tab.page.is_disabled("#previous-bin")
        for number in range(1, 5):
            tab.page.click("#next-bin")
            assert tab.text("#bin-summary").startswith(f"Bin {number}: ")
            assert tab.page.evaluate("location.hash") == f"#bin/train/{number}"
        tab.page.click("#previous-bin")
        assert tab.text("#bin-summary").startswith("Bin 3: ")
        tab.page.go_back()
        tab.page.wait_for_function("document.getElementById('bin-summary').textContent.startsWith('Bin 4: ')")
        tab.page.select_option("#pick-bin", "29")
        assert tab.text("#bin-summary").startswith("Bin 29: ")
        assert tab.page.is_disabled("#next-bin")


def test_a_bin_is_opened_by_its_address(browser: Any, page: Path, plain_page: Path) -> None:
    with open_page(browser, plain_page, hash="#bin/validation/2") as tab:
        assert tab.text("#bin-summary").startswith("Bin 2: ")
        assert tab.page.input_value("#split") == "validation"
    with open_page(browser, plain_page, hash="#bin/train/7/1/0") as tab:
        assert tab.page.get_attribute(".t.now", "data-at") == "0"
        assert "0 in sequence 1" in tab.text("#token-details")
    with open_page(browser, page, hash="#bin/train/999999") as tab:
        assert "Bin 999,999 is not in this page" in tab.text("#results")
    with open_page(browser, page, hash="#bin/nowhere/%E0%A4%A/1") as tab:
        assert tab.text("#bin-summary").startswith("Bin 0: ")


def test_a_split_has_its_own_numbers_and_bins(browser: Any, plain_page: Path) -> None:
    with open_page(browser, plain_page) as tab:
        assert "Bins30" in tab.text("#totals .numbers")
        tab.page.select_option("#split", "validation")
        assert "Bins4" in tab.text("#totals .numbers")
        assert len(tab.page.query_selector_all("#pick-bin option")) == 4


def test_a_finding_leads_to_its_bin_and_names_its_source(browser: Any, page: Path, prepared: Prepared) -> None:
    with open_page(browser, page) as tab:
        tab.page.click("#finding-control_text a")
        tab.page.wait_for_selector(".t.now")
        assert tab.page.evaluate("location.hash").startswith("#bin/train/")
        details = tab.text("#token-details")
        assert f"{prepared.odd}, line 5" in details
        now = tab.page.locator(".t.now")
        assert now.evaluate(_IS_IN_VIEW)
        assert "<|im_end|>" in now.evaluate(_TEXT_FROM)
        tab.screenshot("finding_light_desktop")


def test_search_finds_text_and_marks_it(browser: Any, page: Path) -> None:
    with open_page(browser, page) as tab:
        tab.page.fill("#search-text", "It is 84.")
        tab.page.keyboard.press("Enter")
        assert "1 match in the" in tab.text("#results")
        tab.page.click("#results a")
        marked = tab.page.evaluate("[...document.querySelectorAll('.t.hit')].map((one) => one.textContent).join('')")
        assert "it is 84." in marked.lower()
        tab.screenshot("search_light_desktop")
        tab.page.fill("#search-text", "NOWHERE <b>in</b> it")
        tab.page.click("text=Search >> nth=-1")
        assert tab.text("#results") == "“NOWHERE <b>in</b> it” is not in the " + tab.text("#results").split("the ")[-1]
        tab.page.fill("#search-text", "adding works")
        tab.page.keyboard.press("Enter")
        assert "the first 60 are listed" in tab.text("#results")


def test_ids_are_searched_where_there_is_no_text(browser: Any, plain_page: Path) -> None:
    first = make_bins(30, 64, seed=30)[0].input_ids[:3].tolist()
    with open_page(browser, plain_page) as tab:
        tab.page.fill("#search-text", " ".join(map(str, first)))
        tab.page.keyboard.press("Enter")
        assert "Bin 0, sequence 1" in tab.text("#results")
        assert "Ids are shown instead of text" in tab.text("#totals")


def test_hostile_text_is_shown_as_text(browser: Any, page: Path) -> None:
    with open_page(browser, page) as tab:
        for text in HOSTILE.values():
            shown = text.replace("\u202e", "\\u202e").replace("\u200d", "\u200d")
            start = shown.split("\n")[0][:24]
            tab.page.fill("#search-text", start)
            tab.page.keyboard.press("Enter")
            tab.page.locator("#results a").first.click()
            tokens = tab.page.locator(".tokens:has(.now)").evaluate("(one) => one.textContent")
            assert shown in tokens
            assert "odd.jsonl, line" in tab.text("#token-details")
        assert tab.page.title() == "my_dataset | packed-sft report", "no script of a chat has run"
        assert tab.page.evaluate("document.querySelectorAll('#bin-view :is(b, i, img, script, textarea)').length") == 0
        tab.screenshot("hostile_light_desktop")


def test_a_text_of_100_000_characters_is_all_there(browser: Any, page: Path) -> None:
    with open_page(browser, page, viewport=PHONE, scheme="dark") as tab:
        tab.page.fill("#search-text", "the long one")
        tab.page.keyboard.press("Enter")
        tab.page.locator("#results a").first.click()
        tokens = tab.page.locator(".tokens:has(.now)").evaluate("(one) => one.textContent")
        assert LONG_TEXT in tokens
        tab.page.wait_for_timeout(500)
        assert tab.page.locator(".t.now").evaluate(_IS_IN_VIEW)
        assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        tab.screenshot("long_dark_phone")


def test_tokens_are_reached_and_described_by_keyboard(browser: Any, page: Path) -> None:
    with open_page(browser, page) as tab:
        tab.page.focus(".tokens >> nth=0")
        assert "0 in sequence 1, 0 in the bin" in tab.text("#token-details")
        assert "control token" in tab.text("#token-details")
        tab.page.keyboard.press("ArrowRight")
        assert "1 in sequence 1" in tab.text("#token-details")
        tab.page.keyboard.press("ArrowLeft")
        tab.page.keyboard.press("ArrowLeft")
        assert "0 in sequence 1" in tab.text("#token-details"), "the edge of a sequence is not crossed"
        tab.page.keyboard.press("End")
        assert tab.page.get_attribute(".t.now", "data-at") == str(
            int(tab.page.get_attribute(".tokens >> nth=0 >> .t >> nth=-1", "data-at"))
        )
        tab.page.keyboard.press("Tab")
        assert "0 in sequence 2" in tab.text("#token-details")
        tab.page.focus("a.skip")
        tab.page.keyboard.press("Enter")
        assert tab.page.evaluate("location.hash") == "#main"


def test_pointing_at_a_token_describes_it(browser: Any, page: Path, prepared: Prepared) -> None:
    with open_page(browser, page) as tab:
        trained = tab.page.locator("#bin-view .t.on").first
        trained.scroll_into_view_if_needed()
        trained.hover()
        details = tab.text("#token-details")
        assert "Trainedyes" in details
        assert ".jsonl, line " in details
        assert tab.page.locator(".attention .block.now").count() == 1


def test_the_attention_picture_has_a_block_for_each_sequence(browser: Any, plain_page: Path) -> None:
    first = make_bins(30, 64, seed=30)[0]
    with open_page(browser, plain_page) as tab:
        blocks = tab.page.locator(".attention .block")
        assert blocks.count() == first.num_sequences
        starts = [*first.seq_start_id.tolist(), len(first.input_ids)]
        assert blocks.first.get_attribute("d") == f"M0 0L0 {starts[1]}L{starts[1]} {starts[1]}Z"
        tab.page.evaluate("document.querySelectorAll('.attention .block')[1].dispatchEvent(new MouseEvent('click'))")
        assert tab.page.get_attribute(".t.now", "data-at") == str(starts[1])


def test_the_theme_follows_the_system_until_it_is_chosen(browser: Any, run_page: Path) -> None:
    def background() -> str:
        found: str = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
        return found

    with open_page(browser, run_page) as tab:
        light = background()
        tab.page.emulate_media(color_scheme="dark")
        dark = background()
        assert light != dark
        tab.page.select_option("#theme", "light")
        assert background() == light
        tab.page.emulate_media(color_scheme="light")
        tab.page.select_option("#theme", "dark")
        assert background() == dark
        tab.page.select_option("#theme", "system")
        assert background() == light


@THEMES
@pytest.mark.parametrize("which", ["page", "run_page"])
def test_people_and_screen_readers_can_use_it(
    browser: Any, which: str, scheme: str, request: pytest.FixtureRequest
) -> None:
    with open_page(browser, request.getfixturevalue(which), scheme=scheme) as tab:
        assert tab.page.evaluate(_CONTRAST) == []
        assert tab.page.evaluate(_UNLABELLED) == []
        levels = tab.page.evaluate(
            "[...document.querySelectorAll('h1, h2, h3, h4, h5')].map((one) => Number(one.tagName[1]))"
        )
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(after - before <= 1 for before, after in pairwise(levels))
        ids = tab.page.evaluate("[...document.querySelectorAll('[id]')].map((one) => one.id)")
        assert len(ids) == len(set(ids))
        assert tab.page.evaluate(
            "[...document.querySelectorAll('nav a')].every((one) => document.querySelector(one.hash))"
        )
        # Colour is not the only sign of a trained token.
        if which == "page":
            decoration = "getComputedStyle(document.querySelector('#bin-view .t.on')).textDecorationLine"
            assert tab.page.evaluate(decoration) == "underline"
