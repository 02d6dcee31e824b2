"""The site that tools/docs makes, in a headless browser.

Without Bazel: python -m pytest tests/tools/site_test.py, after tools/docs. It
needs Debian's chromium and chromium-driver.
"""

import functools
import http.server
import os
import pathlib
import shutil
import subprocess
import sys
import threading

import pytest

# The folder of the sources, also in Bazel, whose tests get links to them.
ROOT = pathlib.Path(os.path.realpath(__file__)).parents[2]
TOOLS = pathlib.Path(sys.prefix).parent / ".venv-tools"
sys.path.append(str(TOOLS / "lib" / "python{}.{}".format(*sys.version_info) /
                    "site-packages"))
sys.path.append(str(ROOT / "tools" / "site"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp("site")
  done = subprocess.run(
      [TOOLS / "bin" / "python", "-m", "mkdocs", "build", "--strict",
       "-f", "tools/site/mkdocs.yml", "-d", path], cwd=ROOT, check=False,
      env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True,
      text=True)
  assert done.returncode == 0, done.stdout + done.stderr
  return path


class Handler(http.server.SimpleHTTPRequestHandler):

  def log_message(self, *args):
    pass


@pytest.fixture(scope="module")
def address(folder):
  with http.server.ThreadingHTTPServer(
      ("localhost", 0),
      functools.partial(Handler, directory=str(folder))) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://localhost:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
  from selenium import webdriver  # pylint: disable=import-outside-toplevel
  options = webdriver.ChromeOptions()
  options.binary_location = shutil.which("chromium")
  profile = tmp_path_factory.mktemp("profile")
  for argument in ("headless=new", "no-sandbox", "disable-dev-shm-usage",
                   "hide-scrollbars", f"user-data-dir={profile}"):
    options.add_argument(f"--{argument}")
  options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
  driver = webdriver.Chrome(
      options, webdriver.ChromeService(shutil.which("chromedriver")))
  yield driver
  driver.quit()


def resize(browser, width):
  browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
      "width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False})


# A page tells what is wrong with it after its formulas are drawn.
FAULTS = """
const done = arguments[arguments.length - 1];
const name = (e) => (e.id || e.className || e.outerHTML).slice(0, 80);
MathJax.startup.promise.then(() => done([
  document.querySelector("h1") ? [] : ["no title"],
  [...document.images].filter((i) => !(i.loading == "lazy" || i.naturalWidth))
      .map((i) => "broken image " + i.src),
  [...document.querySelectorAll(".formula")]
      .filter((e) => !e.querySelector("mjx-container") ||
                     e.querySelector("[data-mml-node=merror]") ||
                     e.textContent.includes("`"))
      .map((e) => "formula not drawn: " + e.textContent),
  document.documentElement.scrollWidth > innerWidth ?
      ["wider than the window: " + document.documentElement.scrollWidth] : [],
].flat()));
"""


@pytest.mark.parametrize("width", [400, 1280])
def test_all_pages(folder, address, browser, width):
  resize(browser, width)
  pages = [page for page in sorted(folder.rglob("*.html"))
           if page.name != "404.html"]
  assert len(pages) > 60
  faults = {}
  for page in pages:
    name = str(page.relative_to(folder))
    browser.get(f"{address}/{name}")
    found = browser.execute_async_script(FAULTS) + [
        entry["message"] for entry in browser.get_log("browser")]
    if found:
      faults[name] = found
  assert not faults


@pytest.mark.parametrize("width", [400, 1280])
def test_search(address, browser, width):
  resize(browser, width)
  browser.get(f"{address}/wrapopt/docs/choosing.html")
  # The search begins when its field has the focus.
  browser.execute_script("""
      document.querySelector("[data-md-toggle=search]").click();
      const field = document.querySelector(".md-search__input");
      field.focus();
      field.value = "BEMA";
      field.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true}));""")
  from selenium.webdriver.support import wait  # pylint: disable=import-outside-toplevel
  links = wait.WebDriverWait(browser, 20).until(
      lambda b: b.find_elements("css selector", ".md-search-result__link"))
  assert any("reference/wrapopt.BEMA.html" in link.get_attribute("href")
             for link in links)
  assert not browser.get_log("browser")


def test_what_is_in_the_site(folder, address, browser):
  """The guides with their figures, each public name, the changelog."""
  for name in ("index", "CHANGELOG", "wrapopt/docs/workers",
               "wrapopt/docs/glossary", "wrapopt/bench/index",
               "wrapopt/examples/index", "reference/wrapopt.BEMA",
               "reference/wrapopt.keras.SWA", "reference/wrapopt.ops.apply",
               "reference/wrapopt.checkpoints.posthoc"):
    assert (folder / f"{name}.html").exists()
  browser.get(f"{address}/reference/wrapopt.BEMA.html")
  assert browser.execute_async_script(FAULTS) == []
  assert len(browser.find_elements(
      "css selector", ".formula mjx-container")) == 4
  assert "seed_averages" in browser.find_element("css selector", "article").text


@pytest.mark.parametrize("formula, expected", [
    ("s += (v - s) / (n + 1)", 's " += " (v - s) / (n + 1)'),
    ("beta_t = (1 - 1/t)^(gamma + 1)", "beta_t = (1 - 1/t)^(gamma + 1)"),
    ("(lag + multiplier t)^-ema_power",
     '("lag" + "multiplier " t)^(-"ema_power")'),
    ("g' = g / G,  G = 1 + |w - w_bak| / step_size",
     'g\' = g / G,  G = 1 + |w - w_"bak"| / "step_size"'),
    ("lambda = lambda_ / sqrt(epsilon)", 'lambda = "lambda_" / sqrt(epsilon)'),
    ("w_i = c_i + c_(i+1) + ... + c_k", "w_i = c_i + c_(i+1) + ... + c_k"),
    ("center = (1 / M) sum_k local_k", '"center" = (1 / M) sum_k " local"_k'),
    ("z = the optimizer's step from z", 'z = "the optimizer\'s step from " z')])
def test_asciimath(formula, expected):
  docstrings = pytest.importorskip("docstrings")
  assert docstrings.asciimath(formula) == expected


def test_entries():
  """Entries of sections are rewritten as griffe, which reads them, needs."""
  docstrings = pytest.importorskip("docstrings")
  named = "Raises:\n  A: If a.\n    More.\n  B: If b."
  assert docstrings.markdown(named) == named
  assert docstrings.markdown("Raises:\n  As `f`; also\n  g.\n") == (
      "**Raises:**\n\n- As `f`; also g.\n")
  assert docstrings.markdown("Raises:\n  A: If a\n    b.\n  As `f`.") == (
      "**Raises:**\n\n- A: If a b.\n- As `f`.\n")
  assert docstrings.markdown("Args:\n  x, y,\n    z: As there.\n") == (
      "Args:\n  x: As there.\n  y: As there.\n  z: As there.\n")


def test_markdown():
  docstrings = pytest.importorskip("docstrings")
  assert docstrings.markdown("""A.

    s = v

Example:

>>> f(1)
2

    opt.step()

Args:
  x: An x.

      s = v""") == """A.

```asciimath
`s = v`
```

Example:

```pycon
>>> f(1)
2
```

    opt.step()

Args:
  x: An x.

  ```asciimath
  `s = v`
  ```"""
