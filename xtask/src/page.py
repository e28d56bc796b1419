"""Opens pages of `vramp report` in a headless Chromium and uses them: `cargo xtask page`.

    page.py [--smoke] VRAMP FOLDER [TRACE...]
    page.py --measure PAGE

VRAMP is the program, FOLDER holds what is written. The first page is made from a recording whose
names are hostile, and which this script computes on its own. --smoke opens that page alone, as
continuous integration does: its moments are right, and no name becomes an element or runs. --measure prints how long a page takes
to open, to zoom from the whole run to one event, and to show another moment.
"""

import gzip
import pickle
import random
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import sync_playwright

CHROMIUM = ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"]
HOSTILE = [
    "</script><script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)>",
    "\"><svg onload=alert(1)>",
    "' onmouseover='alert(1)",
    "<!--<script>",
    "a\0b\x1b[2J",
    "\u202egnp.exe\u2066\u2028",
    "__proto__",
    "constructor",
    "{{script}}",
]


def hostile_snapshot(path, seed):
    """Writes a snapshot and returns the live bytes after each event."""
    rng = random.Random(seed)
    events, live, states = [], {}, []
    frames = [
        [{"name": name, "filename": name, "line": line}] + [{"name": "main", "filename": "job.py", "line": 1}]
        for line, name in enumerate(HOSTILE)
    ]
    for step in range(4000):
        if live and rng.random() < 0.48:
            address = rng.choice(list(live))
            size = live.pop(address)
            for action in ("free_requested", "free_completed"):
                events.append({"action": action, "addr": address, "size": size, "stream": 0})
                states.append(sum(live.values()))
        elif step % 500 == 499:
            events.append({"action": "oom", "device_free": 1 << 20, "size": 1 << 34, "stream": 0})
            states.append(sum(live.values()))
        else:
            address = 0x7F0000000000 + (step << 26)
            live[address] = rng.randrange(1, 1 << 25)
            event = {"action": "alloc", "addr": address, "size": live[address], "stream": 0}
            events.append({**event, "frames": rng.choice(frames)})
            states.append(sum(live.values()))
    for index, event in enumerate(events):
        event["time_us"] = 1_700_000_000_000_000 + index * 1000
    snapshot = {
        "segments": [],
        "device_traces": [events],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": HOSTILE[0], HOSTILE[1]: HOSTILE[2]},
    }
    path.write_bytes(pickle.dumps(snapshot, protocol=4))
    return states


def two_devices(path):
    """Writes a snapshot of two devices, of which the second failed."""
    alloc = {"action": "alloc", "addr": 0x7F0000000000, "size": 1 << 20, "stream": 0}
    oom = {"action": "oom", "device_free": 1 << 20, "addr": 0, "size": 1 << 34, "stream": 0}
    snapshot = {"segments": [], "device_traces": [[alloc], [dict(alloc), oom]], "allocator_settings": {}}
    path.write_bytes(pickle.dumps(snapshot, protocol=4))
    return path


def reserved_at_end(trace):
    with gzip.open(trace) as file:
        snapshot = pickle.load(file)
    return sum(segment["total_size"] for segment in snapshot["segments"] if segment.get("device", 0) == 0)


def report(vramp, page, *traces, options=()):
    command = [vramp, "report", *map(str, traces), "-o", str(page), *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return page


class Checks:
    def __init__(self, browser, folder):
        self.browser, self.folder = browser, folder
        self.done = 0

    def check(self, what, holds, seen=""):
        assert holds, f"{what}: {seen}"
        self.done += 1

    @contextmanager
    def open(self, path, *, width=1280, script=True, scheme="light"):
        """Opens a page; ends with an error if it logs, fails, asks or requests anything."""
        context = self.browser.new_context(
            viewport={"width": width, "height": 900}, java_script_enabled=script, color_scheme=scheme
        )
        page = context.new_page()
        wrong = []
        page.on("console", lambda message: wrong.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: wrong.append(request.url) if not self.own(request.url) else None)
        page.goto(path.resolve().as_uri())
        if script:
            page.wait_for_selector("body[data-ready=true]", timeout=30_000)
            self.settle(page)
        yield page
        self.check(f"{path.name} at {width} stays silent", not wrong, wrong)
        context.close()

    @staticmethod
    def own(url):
        return url.startswith("file:") or url == "data:,"

    @staticmethod
    def settle(page):
        """Waits for two frames: everything is drawn on the next one."""
        page.evaluate("() => new Promise((d) => requestAnimationFrame(() => requestAnimationFrame(d)))")

    def view(self, page):
        first, last = page.locator("#timeline").get_attribute("data-view").split()
        return int(first), int(last)

    # --- the checks ---

    def layout(self, path):
        for width in (400, 1900):
            for scheme in ("light", "dark"):
                with self.open(path, width=width, scheme=scheme) as page:
                    over = page.evaluate("() => document.documentElement.scrollWidth - innerWidth")
                    self.check(f"{path.name} is not wider than {width} pixels", over <= 0, over)
                    self.check("the verdict is visible", page.locator(".part:visible .verdict .first").is_visible())
                    self.check("the flame graph has frames", page.locator("#flame .cell").count() > 1)
                    ground = page.evaluate("() => getComputedStyle(document.documentElement).backgroundColor")
                    dark = ground != "rgb(255, 255, 255)"
                    self.check("the colours follow the reader", dark == (scheme == "dark"), ground)
                    page.screenshot(path=self.folder / f"{path.stem}-{width}-{scheme}.png", full_page=True)

    def without_script(self, path):
        with self.open(path, script=False) as page:
            self.check("the verdict needs no script", page.locator(".verdict .first").first.is_visible())
            self.check("the timeline needs no script", page.locator("svg.timeline").first.is_visible())
            self.check("the tables need no script", page.locator(".fallback table").first.is_visible())
            self.check("what needs a script is hidden", not page.locator("#explorer").is_visible())

    def moments(self, path, states):
        """Compares moments with the live bytes that this script computed."""
        with self.open(path) as page:
            def shown():
                self.settle(page)
                state = int(page.locator("body").get_attribute("data-state"))
                return state, page.locator("#moment-text").inner_text().split(" in ")[0]

            before = page.locator("#frame").inner_text()
            page.locator("#moments button", has_text="Peak").click()
            state, text = shown()
            peak = max(states)
            self.check("the peak is the peak", (state, text) == (states.index(peak) + 1, size(peak)), (state, text))
            for typed, expected in (("1,000", 1001), ("1e3", 1001), ("-5", 1001), ("start", 0)):
                page.locator("#event").fill(typed)
                page.locator("#event").press("Enter")
                self.check(f"the event '{typed}' is understood or left out", shown()[0] == expected, shown())
            box = page.locator("#timeline .u-over").bounding_box()
            seen = set()
            for part in (0.1, 0.35, 0.8):
                page.mouse.click(box["x"] + box["width"] * part, box["y"] + box["height"] / 2)
                state, text = shown()
                self.check("a click shows the moment under it", text == size(states[state - 1]), (state, text))
                near = abs(state - part * len(states)) < len(states) * 0.01
                self.check("a click chooses the event under it", near, state)
                seen.add(page.locator("#frame").inner_text())
            self.check("clicks move the flame graph", len(seen) == 3 and before not in seen, seen)
            for event in (0, 1234, len(states) - 1):
                page.locator("#event").fill(str(event))
                page.locator("#event").press("Enter")
                state, text = shown()
                self.check("an event can be typed", (state, text) == (event + 1, size(states[event])), (state, text))
            page.locator("[data-do=previous]").click()
            state, _ = shown()
            self.check("one event back", state == len(states) - 1, state)

    def zooming(self, path, states):
        with self.open(path) as page:
            whole = self.view(page)
            self.check("the whole run is shown first", whole == (0, len(states) + 1), whole)
            timeline = page.locator("#timeline")
            page.locator("#timeline .u-over").scroll_into_view_if_needed()
            box = page.locator("#timeline .u-over").bounding_box()
            x, y = box["x"] + box["width"] * 0.7, box["y"] + 80
            page.mouse.move(x, y)
            for _ in range(80):
                page.mouse.wheel(0, -120)
                self.settle(page)
            first, last = self.view(page)
            self.check("the wheel zooms to one event", last - first == 1, (first, last))
            near = abs(first - 0.7 * len(states)) < len(states) * 0.01
            self.check("the wheel zooms to what is under it", near, first)
            page.mouse.move(x + 1, y)
            self.settle(page)
            text = page.locator("#readout").inner_text()
            wanted = f"Event {first - 1:,}"
            self.check("one event is named", text.startswith(wanted) and size(states[first - 1]) in text, text)
            timeline.focus()
            page.keyboard.press("ArrowRight")
            self.settle(page)
            self.check("an arrow moves by one event", self.view(page) == (first + 1, last + 1), self.view(page))
            page.keyboard.press("Home")
            self.settle(page)
            self.check("Home shows the whole run", self.view(page) == whole, self.view(page))
            page.mouse.move(box["x"] + box["width"] * 0.25, y)
            page.mouse.down()
            page.mouse.move(box["x"] + box["width"] * 0.5, y, steps=5)
            page.mouse.up()
            self.settle(page)
            first, last = self.view(page)
            parts = first / len(states), last / len(states)
            self.check("dragging selects", abs(parts[0] - 0.25) < 0.01 and abs(parts[1] - 0.5) < 0.01, parts)
            page.locator("[data-do=closer]").click()
            self.settle(page)
            first, last = self.view(page)
            shown = int(page.locator("body").get_attribute("data-state"))
            self.check("a button shows the moment's event", (first, last) == (shown, shown + 1), (first, last))
            page.locator("[data-do=all]").click()
            page.locator("#axis").select_option("time")
            self.settle(page)
            page.mouse.move(x, y)
            self.settle(page)
            text = page.locator("#readout").inner_text()
            self.check("the time axis shows times", " s)" in text or "ms)" in text, text)
            for grouping in ("stack", "none", "category"):
                page.locator("#grouping").select_option(grouping)
                self.settle(page)
                self.check("the legend has entries", page.locator("#legend li").count() > 0)

    def addresses(self, path, reserved):
        """Compares the reserved bytes of the segments at the end with those of the recording."""
        with self.open(path) as page:
            page.locator("#moments button", has_text="End").click()
            self.settle(page)
            text = page.locator("#map-text").inner_text()
            self.check("the segments add up", f"{size(reserved)} in all" in text, text)

    def flame(self, path):
        with self.open(path) as page:
            page.locator("#search").fill("main")
            self.settle(page)
            self.check("the search finds frames", page.locator("#flame .match").count() >= 1)
            found = page.locator("#found").inner_text()
            self.check("the search sums up", "iB (100.0 %)" in found, found)
            page.locator("#search").fill("")
            flame = page.locator("#flame")
            flame.focus()
            root = page.locator("#frame").inner_text()
            page.keyboard.press("ArrowDown")
            page.keyboard.press("ArrowDown")
            frame = page.locator("#frame").inner_text()
            self.check("arrows move between frames", frame != root, frame)
            page.keyboard.press("Enter")
            self.check("Enter zooms to a frame", page.locator("#flame .above").count() == 2)
            page.keyboard.press("Escape")
            self.check("Escape shows all stacks", page.locator("#flame .above").count() == 0)

    def hostile(self, path):
        with self.open(path) as page:
            # Everything that shows names is used once.
            page.locator("#grouping").select_option("stack")
            for cell in page.locator("#flame .cell").all()[:12]:
                cell.hover()
            for summary in page.locator("#blocks summary").all()[:10]:
                summary.click()
            if page.locator("#map canvas").count():
                page.locator("#map canvas").first.hover()
            self.settle(page)
            text = page.locator("main").inner_text()
            self.check("names are shown as text", "<script>alert(1)</script>" in text or "onerror=alert(1)" in text)
            made = page.evaluate(
                """() => [...document.querySelectorAll('*')].filter((e) => e.matches('img, iframe, object, embed, base, form, a[href]')
                    || e.getAttributeNames().some((name) => name.startsWith('on'))).map((e) => e.outerHTML.slice(0, 200))"""
            )
            self.check("no name is an element", made == [], made)
            scripts = page.evaluate(
                "() => [...document.scripts].filter((s) => !s.type || s.type === 'text/javascript' || s.type === 'module').length"
            )
            self.check("no name is a script", scripts == 1, scripts)
            invisible = [c for c in "\0\x1b\u202e\u2066\u2028" if c in text]
            self.check("no name hides or turns text", not invisible, invisible)
            self.check("no name changes a prototype", page.evaluate("() => Object.keys(Object.prototype).length") == 0)

    def failure(self, path):
        """The moment that is shown first is the failure of the verdict: the last one."""
        with self.open(path) as page:
            shown = int(page.locator("body").get_attribute("data-state"))
            buttons = page.locator("#moments button").all()
            failures = [int(b.get_attribute("data-state")) for b in buttons if "Failure" in b.inner_text()]
            self.check("the last failure is shown first", len(failures) == 4 and shown == max(failures), (shown, failures))

    def failed_device(self, path):
        with self.open(path) as page:
            chosen = page.locator("#choose").input_value()
            visible = page.locator("#part-1 .verdict").is_visible() and not page.locator("#part-0").is_visible()
            self.check("the device that failed is shown first", chosen == "1" and visible, chosen)

    def ranks(self, path, count):
        with self.open(path) as page:
            rows = page.locator("#ranks tbody tr").count()
            self.check("each recording has a row", rows == count, rows)
            self.check("the chart is drawn", page.locator("#ranks-chart canvas").count() == 1)
            first = page.locator(".part:visible .figures").inner_text()
            page.locator("#choose").select_option("1")
            page.wait_for_selector("#part-1 #explorer #flame .cell")
            self.settle(page)
            second = page.locator(".part:visible .figures").inner_text()
            self.check("the other recording is shown", first != second)
            heading = page.locator("#ranks th button").nth(1)
            heading.click()
            sort = page.locator("#ranks th").nth(1).get_attribute("aria-sort")
            self.check("tables sort", sort == "ascending", sort)
            values = page.evaluate("() => [...document.querySelectorAll('#ranks tbody tr')].map((r) => +r.cells[1].dataset.number)")
            self.check("rows are in order", values == sorted(values), values)


def size(count):
    """Bytes as the page writes them."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    unit = 0
    while count >= 1024 and unit < len(units) - 1:
        count /= 1024
        unit += 1
    return f"{count} {units[unit]}" if unit == 0 else f"{count:.2f} {units[unit]}"


# Turns the wheel over the middle of the timeline once a frame, and returns the time of each frame.
ZOOM = """([turns, direction]) => new Promise((done) => {
  const canvas = document.querySelector('#timeline canvas');
  const over = document.querySelector('#timeline .u-over') || canvas;
  const box = over.getBoundingClientRect();
  const at = { clientX: box.left + box.width / 2, clientY: box.top + box.height / 2 };
  const times = [];
  let last = performance.now();
  const step = (now) => {
    times.push(now - last);
    last = now;
    if (times.length > turns) { done(times.slice(1)); return; }
    over.dispatchEvent(new WheelEvent('wheel', { ...at, deltaY: direction * 120, bubbles: true, cancelable: true }));
    requestAnimationFrame(step);
  };
  requestAnimationFrame(step);
})"""


def measure(browser, path):
    """Prints how a page behaves, in times of the browser."""
    page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    begun = time.monotonic()
    page.goto(path.resolve().as_uri())
    page.wait_for_selector("body[data-ready=true]", timeout=120_000)
    print(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB, open after {time.monotonic() - begun:.2f} s")
    for name, direction in (("in", -1), ("out", 1)):
        before = page.locator("#timeline").get_attribute("data-view")
        times = page.evaluate(ZOOM, [60, direction])
        after = page.locator("#timeline").get_attribute("data-view")
        if before == after:
            sys.exit(f"the wheel did not zoom {name}: events {before}")
        rate, worst = 1000 * len(times) / sum(times), max(times)
        print(f"zoom {name}: {rate:.0f} frames a second, {worst:.0f} ms at most; events {before} to {after}")
    moment = page.evaluate(
        """() => new Promise((done) => {
          const begun = performance.now();
          const end = [...document.querySelectorAll('button')].find((it) => it.textContent.trim() === 'End');
          end.click();
          requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - begun)));
        })"""
    )
    print(f"another moment after {moment:.0f} ms")


@contextmanager
def browser_checks(folder):
    """Starts the browser, and says at the end how many checks passed."""
    chromium = next((path for path in CHROMIUM if Path(path).exists()), None)
    if chromium is None:
        sys.exit("no Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        checks = Checks(browser, folder)
        yield checks
        print(f"page: {checks.done} checks passed with Chromium {browser.version}")
        browser.close()


def main():
    if sys.argv[1] == "--measure":
        chromium = next((path for path in CHROMIUM if Path(path).exists()), None)
        with sync_playwright() as playwright:
            measure(playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"]), Path(sys.argv[2]))
        return
    smoke = sys.argv[1] == "--smoke"
    vramp, folder, *traces = sys.argv[1 + smoke :]
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    snapshot = folder / "hostile.pickle"
    # The name of a file is a name of a recording too.
    named = folder / "<img src=x onerror=alert(1)>.pickle"
    states = hostile_snapshot(snapshot, 1)
    hostile_snapshot(named, 2)
    hostile = report(vramp, folder / "hostile.html", snapshot)
    if smoke:
        with browser_checks(folder) as checks:
            checks.moments(hostile, states)
            checks.hostile(hostile)
        return
    ranks = report(vramp, folder / "ranks.html", snapshot, named)
    devices = report(vramp, folder / "devices.html", two_devices(folder / "devices.pickle"))
    bins = report(vramp, folder / "bins.html", snapshot, options=["--budget", "1kB"])
    pages = [report(vramp, folder / f"{Path(t).name.split('.')[0]}.html", t) for t in traces]
    with browser_checks(folder) as checks:
        checks.moments(hostile, states)
        checks.zooming(hostile, states)
        checks.flame(hostile)
        for page in (hostile, ranks):
            checks.hostile(page)
        checks.ranks(ranks, 2)
        checks.without_script(hostile)
        checks.failure(hostile)
        checks.failed_device(devices)
        with checks.open(bins) as page:
            text = page.locator(".missing").inner_text()
            checks.check("a page without events says so", "too large for this page" in text, text)
            checks.check("it has a timeline", page.locator("#timeline canvas").count() == 1)
        for page, trace in zip(pages, traces):
            checks.addresses(page, reserved_at_end(trace))
        for page in [hostile, ranks, *pages]:
            checks.layout(page)


if __name__ == "__main__":
    main()
