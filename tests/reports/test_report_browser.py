"""The page in a real browser: no requests, every screen, pointer, touch and keys, without script, on paper, hard names."""

import itertools
import re
import shutil
from dataclasses import replace

import pytest
import torch
from documents import UGLY, bare, document, large, layer
from torch import nn

import secateur as sc
from secateur.reports import Report
from secateur.reports.document import Mask

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
PATIENCE = 120_000  # milliseconds that a step may take on a busy machine


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=PATIENCE)
        yield found
        found.close()


@pytest.fixture
def open_page(browser, tmp_path):
    """Opens the page of a document and returns it with what it logged, raised and requested."""
    contexts = []

    def open_(made, name="report.html", **options):
        file = Report(made).save(tmp_path / name)
        context = browser.new_context(**{"viewport": WIDE, **options})
        context.set_default_timeout(PATIENCE)
        contexts.append(context)
        page = context.new_page()
        page.log = []
        page.on("console", lambda message: page.log.append(message.text))
        page.on("pageerror", lambda error: page.log.append(str(error)))
        page.on("request", lambda request: page.log.append(request.url) if request.url != file.as_uri() else None)
        page.goto(file.as_uri())
        return page

    yield open_
    for context in contexts:
        context.close()


def overflow(page):
    return page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")


def violations(page):
    from axe_core_python.sync_playwright import Axe

    return [(found["id"], [node["html"][:200] for node in found["nodes"]]) for found in Axe().run(page)["violations"]]


def readout(page):
    return page.locator("#readout .nm").inner_text()


def names(page):
    return page.locator("#layers tbody tr:visible th").all_inner_texts()


# --- 1: nothing leaves the page ---------------------------------------------------------------------------------------------


def test_page_of_a_real_model_logs_and_requests_nothing(open_page, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.Flatten(), nn.Linear(32 * 16, 10)).eval()
    image = torch.randn(1, 3, 8, 8)
    small, cut = sc.shrink(model, image, flops=0.6)
    plan = sc.prune_(small, sparsity=0.8)
    packed = sc.compress_(small, image, objective="size")
    report = sc.report(
        cut, plan, packed, before=model, after=small, example_inputs=image, evaluate=lambda _: 0.5, samples=100, seconds=0.05
    )
    page = open_page(report.document)
    for chart in page.locator(".track svg, .masks svg, .multi svg").all():
        assert chart.bounding_box()["height"] > 10
    page.locator("#plot").press("ArrowRight")
    assert page.log == []


def test_security_policy_keeps_scripts_and_requests_out(open_page):
    page = open_page(document())
    policy = page.locator("meta[http-equiv=Content-Security-Policy]").get_attribute("content")
    assert policy.startswith("default-src 'none'")
    assert "script-src 'sha256-" in policy
    page.evaluate("""() => {
        window.refused = [];
        document.addEventListener("securitypolicyviolation", event => window.refused.push(event.effectiveDirective));
        const script = document.createElement("script");
        script.textContent = "window.hacked = true";
        const image = document.createElement("img");
        image.src = "https://example.com/x.png";
        document.body.append(script, image);
    }""")
    page.wait_for_function("window.refused.length === 2")
    assert sorted(page.evaluate("window.refused")) == ["img-src", "script-src-elem"]
    assert page.evaluate("window.hacked") is None


# --- 2: every screen --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [WIDE, PHONE], ids=["wide", "phone"])
def test_no_sideways_scroll_and_no_violation_of_accessibility_rules(open_page, viewport, scheme):
    page = open_page(document(), viewport=viewport, color_scheme=scheme)
    assert overflow(page) == 0
    assert violations(page) == []
    page.locator("details").first.click()
    page.locator("#plot").press("End")
    assert violations(page) == []
    assert page.log == []


@pytest.mark.parametrize("width", [320, 600, 800, 1000, 1920])
def test_no_sideways_scroll_at_other_widths(open_page, width):
    assert overflow(open_page(document(), viewport={"width": width, "height": 800})) == 0


def test_table_of_layers_fits_a_wide_screen(open_page):
    """The bytes of a Llama's layers were cut off at the right."""
    sizes = {"before": [768, 288], "after": [768, 288], "channels": [768, 768], "kept": 110_592, "bytes_before": 884_736}
    why = "it shares its weight (model.embed_tokens.weight, lm_head.weight), which stays in memory"
    rows = [layer(i, f"model.layers.{i}.self_attn.q_proj", **sizes, bytes_after=476_208) for i in range(1, 5)]
    rows.append(layer(0, "model.embed_tokens", **sizes, bytes_after=884_736, reason=why))
    page = open_page(document(layers=rows))
    assert page.evaluate("(box => box.scrollWidth - box.clientWidth)(document.querySelector('#layers'))") == 0


@pytest.mark.parametrize("width", [320, 577, 961])
def test_names_on_the_axis_lie_inside_and_apart(open_page, width):
    names = ["vit.embeddings.cls_token", *(f"vit.layers.{i}.{part}" for i in range(6) for part in "qkvo"), "classifier"]
    for each in (names, ["weight"], [f"a_rather_long_part_{i}.conv" for i in range(12)], [f"{i}.0" for i in range(200)]):
        rows = [layer(i, name) for i, name in enumerate(each)]
        page = open_page(document(layers=rows), viewport={"width": width, "height": 800})
        boxes = [label.bounding_box() for label in page.locator(".axis span:visible").all()]
        ends = [(box["x"], box["x"] + box["width"]) for box in boxes]
        assert ends
        assert all(a[1] < b[0] for a, b in itertools.pairwise(ends))
        assert ends[0][0] >= 0
        assert ends[-1][1] <= width


# --- 3: pointer, touch, keys ------------------------------------------------------------------------------------------------


def test_pointer_moves_the_readout(open_page):
    page = open_page(document())
    assert "40 layers" in readout(page)
    page.locator(".box.w").scroll_into_view_if_needed()
    box = page.locator(".box.w").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 3, box["y"] + 10)
    assert readout(page) == "layer2.9.conv2"
    page.mouse.move(box["x"] + 3, box["y"] + 10)
    assert readout(page) == "layer1.0.conv1"
    assert "channels 16 → 12" in page.locator("#readout").inner_text()
    assert page.locator("#layers tr.on th").inner_text() == "layer1.0.conv1"


def test_touch_moves_the_readout(open_page):
    page = open_page(document(), viewport=PHONE, has_touch=True, is_mobile=True)
    page.locator(".box.w").scroll_into_view_if_needed()
    box = page.locator(".box.w").bounding_box()
    page.touchscreen.tap(box["x"] + box["width"] - 3, box["y"] + 10)
    assert readout(page) == "layer2.9.conv2"


def test_keys_move_the_readout_and_a_screen_reader_hears_it(open_page):
    page = open_page(document())
    plot = page.locator("#plot")
    plot.focus()
    steps = {
        "End": "layer2.9.conv2",
        "ArrowLeft": "layer2.9.conv1",
        "PageDown": "layer2.4.conv1",
        "Home": "layer1.0.conv1",
        "ArrowRight": "layer1.0.conv2",
        "PageUp": "layer1.5.conv2",
    }
    for key, name in steps.items():
        plot.press(key)
        assert readout(page) == name
    assert plot.get_attribute("role") == "slider"
    assert plot.get_attribute("aria-valuenow") == "12"
    assert plot.get_attribute("aria-valuetext").startswith("layer1.5.conv2: channels 16 to 12, weights 2,304 to")


def test_table_sorts_up_and_down(open_page):
    made = document()
    page = open_page(made)
    kept = page.locator("#layers thead th", has_text="Weights kept")
    for direction, reverse in (("ascending", False), ("descending", True)):
        kept.locator("button").click()
        assert kept.get_attribute("aria-sort") == direction
        assert page.locator("#layers thead th[aria-sort=none]").count() == page.locator("#layers thead th").count() - 1
        expected = [row.name for row in sorted(made.layers, key=lambda row: row.kept, reverse=reverse)]
        assert names(page) == expected
    page.locator("#layers thead button", has_text="Faster").click()  # what was not measured comes last
    assert all(row.format for row in made.layers if row.name in names(page)[:32])


def test_find_and_filter_work_together_and_are_counted(open_page):
    page = open_page(document())
    page.locator("#find").fill("LAYER2")
    assert page.locator("#count").inner_text() == "20 of 40 layers"
    page.locator("#choice").select_option("dense")
    assert page.locator("#count").inner_text() == "4 of 40 layers"
    assert names(page) == [f"layer2.{i}.conv{j}" for i, j in ((0, 1), (2, 2), (5, 1), (7, 2))]
    page.locator("#find").fill("")
    page.locator("#choice").select_option("")
    assert page.locator("#count").inner_text() == "40 layers"


def test_theme_is_kept(open_page):
    page = open_page(document(), color_scheme="light")
    paper = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paper)
    page.locator(".theme label", has_text="Dark").click()
    dark = page.evaluate(paper)
    assert dark != light
    page.reload()
    assert page.evaluate(paper) == dark
    page.locator(".theme label", has_text="Auto").click()
    assert page.evaluate(paper) == light


def test_recipe_is_copied_or_selected(open_page):
    from playwright.sync_api import expect

    page = open_page(document())
    page.clock.install()  # the label stays until the test lets its 1.5 seconds pass
    page.locator(".copy").click()
    expect(page.locator(".copy")).to_have_text(re.compile("^(Copied|Selected)$"), timeout=PATIENCE)
    page.clock.run_for(1500)
    expect(page.locator(".copy")).to_have_text("Copy", timeout=PATIENCE)


# --- 4: without script, on paper --------------------------------------------------------------------------------------------


def test_everything_is_there_without_script(open_page):
    made = document()
    page = open_page(made, java_script_enabled=False)
    assert names(page) == [row.name for row in made.layers]
    for chart in page.locator(".track svg, .curve svg, .masks svg, .multi:visible svg").all():
        assert chart.bounding_box()["height"] > 10
    text = page.locator("main").inner_text().replace("\u00a0", " ")
    for figure in ("90.30 %", "400 k", "125 M", "1.76 MB", "3.75 ms"):
        assert figure in text
    assert "38.1 %" in page.locator(".two figure").get_attribute("aria-label")
    for control in (".theme", ".controls", ".copy", "#readout"):
        assert not page.locator(control).is_visible()


def test_paper_is_light_and_has_the_whole_table(open_page):
    page = open_page(document(), color_scheme="dark", viewport={"width": 718, "height": 1000})  # A4 without margins
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    for control in (".theme", ".controls", ".copy", "#readout", ".cursor"):
        assert not page.locator(control).first.is_visible()
    assert page.evaluate("(box => box.scrollHeight - box.clientHeight)(document.querySelector('#layers'))") <= 0
    assert overflow(page) == 0
    for chart in page.locator("figure:visible, .track, .code").all():
        assert chart.evaluate("chart => getComputedStyle(chart).breakInside") == "avoid"
        assert chart.bounding_box()["height"] < 900
    assert page.pdf(format="A4").startswith(b"%PDF")


# --- 5: hard documents ------------------------------------------------------------------------------------------------------


def test_hard_names_are_shown_and_run_nothing(open_page):
    rows = [layer(i, name) for i, name in enumerate(UGLY)]
    made = document(layers=rows, masks=[Mask(UGLY[2], UGLY[3], 1, 2, "10", 0.5)])
    made = replace(made, model=replace(made.model, name=UGLY[0], data=UGLY[3]))
    for viewport in (WIDE, PHONE):
        page = open_page(made, viewport=viewport)
        assert [" ".join(name.split()) for name in names(page)] == [" ".join(name.split()) for name in UGLY]
        page.locator("#plot").press("End")
        assert readout(page) == UGLY[3]
        assert page.evaluate("window.hacked") is None
        assert overflow(page) == 0
        assert page.log == []
    assert violations(page) == []


@pytest.mark.parametrize(
    "made",
    [bare(), bare(1), document(1), document(sweep=None, masks=[], stages=[], steps=[]), document(layers=[], masks=[])],
    ids=["bare", "one layer, bare", "one layer", "no figures", "no layers"],
)
def test_documents_with_little_in_them_are_whole_pages(open_page, made):
    page = open_page(made)
    assert page.log == []
    assert overflow(page) == 0
    assert violations(page) == []


def test_thousand_layers_read_well(open_page):
    made = large(1000)
    page = open_page(made)
    page.locator("#plot").press("End")
    assert readout(page) == "lm_head"
    page.locator("#plot").press("Home")
    assert readout(page) == "model.layers.0"
    assert "layers 7" in page.locator("#readout").inner_text()
    page.locator("#find").fill("layers.77.mlp")
    assert page.locator("#count").inner_text() == "3 of 1,000 layers"
    assert page.log == []
    assert overflow(page) == 0


def test_notebook_frame_shows_the_page_and_keeps_its_styles(open_page, browser, tmp_path):
    (tmp_path / "cell.html").write_text(f"<!doctype html><body>{Report(document(4))._repr_html_()}", encoding="utf-8")
    context = browser.new_context(viewport=WIDE)
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    page.goto((tmp_path / "cell.html").as_uri())
    frame = page.frame_locator("iframe")
    frame.locator("#plot").press("End")
    assert frame.locator("#readout .nm").inner_text() == "layer1.1.conv2"
    assert page.evaluate("getComputedStyle(document.body).margin") == "8px"
    context.close()
