// The page: chooses a part and a moment, and shows them.

class App {
  constructor(data) {
    this.data = data;
    this.state = 0;
    this.recordings = data.parts.map((head, part) => new Recording(head, part));
    this.explorer = document.getElementById("explorer");
    this.status = document.getElementById("status");
    this.event = document.getElementById("event");
    this.timeline = new Timeline(this);
    this.flame = new FlameGraph(this);
    this.map = new AddressMap(this);
    this.listen();
  }

  async choose(part) {
    const recording = this.recordings[part];
    this.recording = recording;
    document.querySelectorAll(".part").forEach((element, nth) => (element.hidden = nth !== part));
    document.querySelector(`#part-${part} .explorer-place`).append(this.explorer);
    this.explorer.hidden = false;
    this.state = recording.head.peak;
    this.timeline.axis = "event";
    document.getElementById("axis").value = "event";
    this.showMoments();
    // The overview needs no decoding, so that something is there at once.
    this.timeline.show(recording);
    document.body.dataset.painted = "true";
    if (!recording.decoded && recording.head.kept !== "bins") {
      this.status.hidden = false;
      this.status.textContent = "Decoding the recording.";
      await new Promise((done) => setTimeout(done, 0));
      try {
        await recording.decode();
      } catch (error) {
        this.status.textContent = `The events of the recording cannot be decoded (${error}). The overview remains.`;
        return;
      }
    }
    if (this.recording !== recording) return;
    this.status.hidden = recording.decoded;
    if (!recording.decoded) this.status.textContent = "This page has only the overview of the recording: see above.";
    document.getElementById("axis").querySelector("[value=time]").disabled = !recording.hasTimes;
    this.explorer.classList.toggle("bins-only", !recording.decoded);
    this.timeline.show(recording);
    this.setState(recording.head.failures[recording.head.shown_failure]?.state ?? recording.head.peak);
    document.body.dataset.ready = "true";
  }

  showMoments() {
    const { head } = this.recording;
    const moments = [["Peak", head.peak]];
    // The first ones, and the one that the verdict is about.
    head.failures.forEach((failure, i) => {
      if (i >= 3 && i !== head.shown_failure) return;
      const number = i === head.failures.length - 1 ? i + head.failures_left_out + 1 : i + 1;
      moments.push([head.failures.length > 1 ? `Failure ${countText(number)}` : "Failure", failure.state]);
    });
    moments.push(["End", head.events]);
    document.getElementById("moments").replaceChildren(...moments.map(([name, state]) => {
      const button = element("button", "", name);
      button.type = "button";
      button.dataset.state = state;
      button.addEventListener("click", () => this.setState(state));
      return button;
    }));
  }

  setState(state) {
    const { recording } = this;
    this.state = Math.max(0, Math.min(recording.states - 1, Math.round(state) || 0));
    this.event.value = this.state === 0 ? "start" : countText(this.state - 1);
    document.querySelectorAll("#moments button").forEach((button) => {
      button.setAttribute("aria-pressed", String(Number(button.dataset.state) === this.state));
    });
    this.timeline.redraw();
    if (!recording.decoded || this.waiting) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = 0;
      this.showMoment();
    });
  }

  showMoment() {
    const { recording, state } = this;
    const live = recording.liveBlocks(state);
    const bytes = live.reduce((sum, block) => sum + recording.size[block], 0);
    const time = recording.hasTimes ? `, ${secondsText(recording.timeOf(state))} after the first event` : "";
    document.getElementById("moment-text").textContent = `${bytesText(bytes)} in ${counted(live.length, "live block")}${time}`;
    this.flame.show(recording, live);
    showBlocks(this, recording, live);
    document.getElementById("map-section").hidden = !recording.head.has_addresses;
    if (recording.head.has_addresses) this.map.show(recording, state, live);
    document.body.dataset.state = String(state);
  }

  eventText(state) {
    return state === 0 ? "before the first event" : `event ${countText(state - 1)}`;
  }

  // The frames of a stack, outermost first.
  stackFrames(stack) {
    if (stack < 0) return [];
    const { recording } = this;
    const frames = [];
    for (let node = recording.stackNode[stack]; node > 0; node = recording.nodeParent[node]) {
      frames.push(recording.frames[recording.nodeFrame[node]]);
    }
    return frames.reverse();
  }

  // One line for a stack: the innermost frame of the program, not of the framework.
  stackName(stack) {
    return stack < 0 ? "no stack recorded" : this.recording.frames[this.recording.stackLine[stack]];
  }

  // The line of the program and the innermost frame.
  stackTitle(stack) {
    const line = this.stackName(stack);
    const innermost = this.stackFrames(stack).pop();
    return innermost === undefined || innermost === line ? line : `${line}: ${innermost}`;
  }

  listen() {
    document.addEventListener("click", (event) => {
      const name = event.target.closest?.("[data-do]")?.dataset.do;
      if (!name || this.timeline.command(name)) return;
      if (name === "previous") this.setState(this.state - 1);
      if (name === "next") this.setState(this.state + 1);
    });
    this.event.addEventListener("change", () => {
      // What is not a number leaves the moment as it is.
      const text = this.event.value.replace(/[,\s]/g, "");
      const other = text === "start" ? 0 : this.state;
      this.setState(/^\d+$/.test(text) ? Number(text) + 1 : other);
    });
    const on = (id, change) => document.getElementById(id).addEventListener("change", (event) => change(event.target));
    on("grouping", (select) => {
      this.timeline.grouping = select.value;
      this.timeline.hidden.clear();
      this.timeline.regroup();
    });
    on("axis", (select) => {
      this.timeline.axis = select.value;
      this.timeline.redraw();
    });
    on("fit", (box) => {
      this.timeline.fit = box.checked;
      this.timeline.redraw();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      COLOURS.clear();
      this.timeline.regroup();
      if (this.recording.decoded) this.showMoment();
      if (this.ranks) showRanks(this);
    });
  }
}

// Makes the headings of tables buttons that sort.
function sortable(table) {
  const body = table.tBodies[0];
  [...table.tHead.rows[0].cells].forEach((heading, column) => {
    const button = element("button", "", heading.textContent);
    button.type = "button";
    heading.replaceChildren(button);
    button.addEventListener("click", () => {
      const ascending = heading.getAttribute("aria-sort") !== "ascending";
      [...table.tHead.rows[0].cells].forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", ascending ? "ascending" : "descending");
      const key = (row) => row.cells[column].dataset.number ?? row.cells[column].textContent;
      const compare = (a, b) => {
        const [left, right] = [key(a), key(b)];
        const order = Number(left) - Number(right);
        return Number.isNaN(order) ? left.localeCompare(right) : order;
      };
      const rows = [...body.rows].sort((a, b) => (ascending ? compare(a, b) : compare(b, a)));
      body.replaceChildren(...rows);
    });
  });
}

// A button beside each line to paste.
function copyable(paste) {
  const line = paste.querySelector("pre");
  const button = element("button", "", "Copy");
  button.type = "button";
  button.addEventListener("click", () => {
    const selection = getSelection();
    selection.selectAllChildren(line);
    // A page from a file may have no clipboard; the line is selected then.
    navigator.clipboard?.writeText(line.textContent).then(() => (button.textContent = "Copied"), () => {});
  });
  paste.append(button);
}

// The live bytes of all parts in one chart, each over its own run.
function showRanks(app) {
  const box = document.getElementById("ranks-chart");
  box.replaceChildren();
  const POINTS = 300;
  const palette = paletteColours();
  const xs = Array.from({ length: POINTS + 1 }, (_, i) => (100 * i) / POINTS);
  const lines = app.data.parts.map(({ bins }) => {
    const values = [];
    for (let i = 0; i <= POINTS; i++) {
      const from = Math.min(bins.max.length - 1, Math.floor((i * bins.max.length) / (POINTS + 1)));
      const until = Math.max(from + 1, Math.floor(((i + 1) * bins.max.length) / (POINTS + 1)));
      values.push(bins.max.slice(from, until).reduce((most, bytes) => Math.max(most, bytes), 0));
    }
    return values;
  });
  const axis = { stroke: css("--soft"), grid: { stroke: css("--grid"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
  const narrow = box.clientWidth < 600;
  app.ranks = new uPlot({
    width: Math.max(200, box.clientWidth), height: 220, legend: { show: false }, cursor: { show: false }, padding: [10, 14, 0, 0],
    scales: { x: { time: false }, y: { range: (u, min, max) => [0, (max || 1) * 1.05] } },
    series: [{}, ...lines.map((_, i) => ({ stroke: palette[i % palette.length], width: 1.5, dash: i >= palette.length ? [5, 3] : [], points: { show: false } }))],
    axes: [
      { ...axis, values: (u, ticks) => ticks.map((tick) => `${tick} %`) },
      { ...axis, size: narrow ? 64 : 74, splits: binaryTicks, values: (u, ticks) => ticks.map((tick) => tickText(tick, u.scales.y.max)) },
    ],
  }, [xs, ...lines], box);
  const list = element("ul", "swatches");
  list.append(...app.data.parts.map((part, i) => {
    const item = element("li");
    const swatch = element("i", "line");
    swatch.style.setProperty("--swatch", palette[i % palette.length]);
    item.append(swatch, part.title);
    return item;
  }));
  box.append(list);
  box.append(element("p", "note", "Allocated bytes, from the first to the last event of each recording."));
}

function start() {
  document.body.classList.add("script");
  const data = JSON.parse(document.getElementById("data").textContent);
  document.querySelectorAll("table.sortable").forEach(sortable);
  document.querySelectorAll(".paste").forEach(copyable);
  const app = new App(data);
  if (data.parts.length > 1) {
    const select = document.getElementById("choose");
    select.append(...data.parts.map((part, i) => {
      const option = element("option", "", part.title);
      option.value = String(i);
      return option;
    }));
    select.addEventListener("change", () => app.choose(Number(select.value)));
    document.getElementById("chooser").hidden = false;
    showRanks(app);
    addEventListener("resize", () => app.ranks.setSize({ width: document.getElementById("ranks-chart").clientWidth, height: 220 }));
  }
  // The first recording that failed, if one did.
  const first = Math.max(0, data.parts.findIndex((head) => head.shown_failure !== null));
  document.getElementById("choose").value = String(first);
  if (data.parts.length > 0) app.choose(first);
  return app;
}

const page = start();
