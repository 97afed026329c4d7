"""TensorBoard's pages in a headless browser: curves over training time, selection maps, and the profiler's trace."""

import re
import shutil
import subprocess
import sys

import pytest
from conftest import make_small_model, make_table
from small_runs import SETTINGS, run

import profiler
import train
from elastic_trainer.settings import Settings

DRIVER, BROWSER = shutil.which("chromedriver"), shutil.which("chromium")
webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium (requirements-dev.txt)")
pytestmark = pytest.mark.skipif(
    not (DRIVER and BROWSER), reason="needs a headless browser: apt-get install chromium chromium-driver"
)
SECONDS = 60  # to wait for a page to show something
TEXT = """
    const texts = node => node.nodeType === 3 ? [node.data] : ["SCRIPT", "STYLE"].includes(node.nodeName) ? [] :
        [...(node.shadowRoot ? texts(node.shadowRoot) : []), ...[...node.childNodes].flatMap(texts)];
    return texts(document.body).join("\\n");
"""


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,1600"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def board(tmp_path_factory, quick_profiles):
    """The address of TensorBoard on two runs and a profile."""
    folder = tmp_path_factory.mktemp("logs")
    for name in ("elastic", "full"):
        (folder / name).mkdir()
        model = make_small_model()
        table = make_table(model) if name == "elastic" else None
        scheme = train.elastic_training if table else train.full_training
        run(folder / name, scheme, Settings(num_epochs=3, interval=1, rho=0.6), model, table)
    profiler.profile(make_small_model(), SETTINGS, folder / "profiles" / "small")
    yield from serve(folder)


def serve(folder):
    words = [sys.executable, "-m", "tensorboard.main", "--logdir", folder, "--host", "127.0.0.1", "--port", "0"]
    with subprocess.Popen([*map(str, words)], stderr=subprocess.PIPE, text=True) as server:
        yield next(found[0] for line in server.stderr or () if (found := re.search(r"http://127\.0\.0\.1:\d+/", line)))
        server.terminate()


def eventually(browser, look, seconds=SECONDS):
    """Wait until `look` returns something true; returns that. Errors of a page that is still loading are ignored."""
    from selenium.common.exceptions import WebDriverException
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, seconds, ignored_exceptions=[WebDriverException]).until(lambda _: look())


def text(browser):
    return browser.execute_script(TEXT)


def show_time_series(browser, address, tags, seconds=SECONDS):
    """Open the page of curves and maps with those `tags` (a regular expression); returns the runs that it lists."""
    browser.get("about:blank")
    browser.get(f"{address}?tagFilter={tags}#timeseries")

    def runs():
        cells = browser.find_elements("css selector", "runs-data-table tb-data-table-content-cell")
        return [cell.text for cell in cells if cell.text]

    return eventually(browser, runs, seconds)


def test_curves_of_both_runs_are_shown_over_training_time(browser, board):
    tags = {"test/accuracy", "test/loss", "train/accuracy", "train/loss"}
    assert show_time_series(browser, board, "^(test|train)/") == ["elastic", "full"]

    def cards(what):
        found = [card.text.split("\n") for card in browser.find_elements("css selector", "scalar-card-component")]
        return {lines[0] + lines[1] for lines in found if what(lines)}

    # The table under each card holds the last point of each run.
    eventually(browser, lambda: cards(lambda lines: {"elastic", "full"} <= {*lines}) == tags)
    browser.find_element("css selector", "tb-dropdown mat-select").click()
    eventually(browser, lambda: browser.find_elements("xpath", "//mat-option[normalize-space()='Relative']"))[0].click()
    # The last label of the axis; without points it would be 1 ms.
    eventually(browser, lambda: cards(lambda lines: re.fullmatch(r"[\d.]+ sec|\d\d+ ms", lines[-1])) == tags)


def test_selection_maps_are_shown(browser, board):
    show_time_series(browser, board, "^selection/tensors")

    def widths():
        images = browser.find_elements("css selector", "image-card-component img")
        return [browser.execute_script("return arguments[0].naturalWidth", image) for image in images]

    eventually(browser, lambda: widths() == [600, 600])


def test_profiler_trace_opens_in_the_trace_viewer(browser, board):
    browser.get("about:blank")
    browser.get(f"{board}#profile")

    def into(*path):
        browser.switch_to.default_content()
        for frame in path:
            browser.switch_to.frame(browser.find_element("css selector", frame))
        return text(browser)

    eventually(browser, lambda: "profiles/small/" in into("iframe"))
    # The tools are the second list.
    eventually(browser, lambda: browser.find_elements("css selector", "mat-select")[1]).click()
    eventually(browser, lambda: browser.find_elements("xpath", "//mat-option[contains(., 'Trace Viewer')]"))[0].click()
    eventually(browser, lambda: {"/host:CPU", "python"} <= {*into("iframe", "iframe").split()})


def test_page_without_runs_lists_no_runs(browser, tmp_path):
    from selenium.common.exceptions import TimeoutException

    for address in serve(tmp_path):
        with pytest.raises(TimeoutException):
            show_time_series(browser, address, ".", seconds=10)
