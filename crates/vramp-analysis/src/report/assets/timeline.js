// The timeline: stacked areas of live bytes, lines of reserved bytes, marks. uPlot draws it.

const LINES = {
  recorded: { colour: "--line-recorded", dash: [] },
  vramp: { colour: "--line-vramp", dash: [] },
  torch: { colour: "--line-torch", dash: [6, 4] },
  expandable: { colour: "--line-expandable", dash: [2, 3] },
};
const TOP_STACKS = 8;

const COLOURS = new Map();

// A colour of the style. Reading it makes the browser compute styles, so it is read once.
function css(name) {
  if (!COLOURS.has(name)) COLOURS.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return COLOURS.get(name);
}

function bytesText(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  let value = Math.abs(bytes);
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit++;
  }
  const text = unit === 0 ? String(value) : value.toFixed(2);
  return `${bytes < 0 ? "-" : ""}${text} ${units[unit]}`;
}

function countText(count) {
  return Math.round(count).toLocaleString("en-US");
}

function counted(count, noun) {
  return `${countText(count)} ${noun}${count === 1 ? "" : "s"}`;
}

function secondsText(seconds) {
  if (seconds >= 100) return `${seconds.toFixed(1)} s`;
  if (seconds >= 1) return `${seconds.toFixed(3)} s`;
  if (seconds >= 1e-3) return `${(seconds * 1e3).toFixed(3)} ms`;
  return `${(seconds * 1e6).toFixed(0)} us`;
}

function binaryTicks(u, axis, min, max, increment, space) {
  const most = Math.max(Math.abs(min), Math.abs(max), 1);
  const unit = 1024 ** Math.min(5, Math.floor(Math.log2(most) / 10));
  const lines = Math.max(2, Math.floor(u.bbox.height / devicePixelRatio / 48));
  let step = unit;
  for (const factor of [1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500]) {
    step = factor * unit;
    if ((max - min) / step <= lines) break;
  }
  const ticks = [];
  for (let tick = Math.ceil(min / step) * step; tick <= max; tick += step) ticks.push(tick);
  return ticks;
}

function tickText(bytes, top) {
  const unit = Math.min(5, Math.floor(Math.log2(Math.max(top, 1)) / 10));
  const value = bytes / 1024 ** unit;
  const text = Number(value.toFixed(3)).toString();
  return `${text} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][unit]}`;
}

class Timeline {
  constructor(app) {
    this.app = app;
    this.box = document.getElementById("timeline");
    this.strip = document.getElementById("overview");
    this.legend = document.getElementById("legend");
    this.readout = document.getElementById("readout");
    this.hidden = new Set();
    this.grouping = "category";
    this.axis = "event";
    this.fit = false;
    this.listen();
  }

  // --- what is shown ---

  show(recording) {
    this.recording = recording;
    this.view = [0, recording.states];
    this.regroup();
  }

  get head() {
    return this.recording.head;
  }

  // Chooses the groups of the stacked areas, and draws anew.
  regroup() {
    const { recording, head } = this;
    const palette = paletteColours();
    this.groupNames = head.categories.slice();
    this.groupColours = head.categories.map((name, i) => palette[i % palette.length]);
    if (recording.decoded) {
      const { names, colours, groupOf } = this.groups();
      this.groupNames = names;
      this.groupColours = colours;
      this.levels = recording.group(groupOf, names.length);
    }
    this.make();
  }

  groups() {
    const { recording, head } = this;
    const palette = paletteColours();
    if (this.grouping === "none") {
      return { names: ["allocated"], colours: [palette[0]], groupOf: new Uint8Array(recording.siteStack.length) };
    }
    if (this.grouping === "category") {
      return { names: this.groupNames, colours: this.groupColours, groupOf: recording.siteCategory };
    }
    // Stacks that look the same are one group.
    const nameOf = Array.from(recording.stackNode, (_, stack) => this.app.stackTitle(stack));
    const name = (site) => nameOf[recording.siteStack[site]] ?? this.app.stackTitle(-1);
    const bytes = new Map();
    for (const block of recording.liveBlocks(head.peak)) {
      const key = name(recording.site[block]);
      bytes.set(key, (bytes.get(key) || 0) + recording.size[block]);
    }
    const top = [...bytes].sort((a, b) => b[1] - a[1]).slice(0, TOP_STACKS).map(([key]) => key);
    const groupOf = new Uint8Array(recording.siteStack.length);
    for (let site = 0; site < groupOf.length; site++) {
      const place = top.indexOf(name(site));
      groupOf[site] = place < 0 ? top.length : place;
    }
    const colours = top.map((_, i) => palette[i % palette.length]);
    return { names: [...top, "all others"], colours: [...colours, css("--rest")], groupOf };
  }

  // --- data ---

  // The position of a state on the x axis.
  xOf(state) {
    return this.axis === "time" ? this.recording.timeOf(state) : state - 1;
  }

  edges() {
    const [first, last] = this.view;
    const columns = Math.max(2, Math.floor(this.plotWidth()));
    const edges = [first];
    if (this.axis === "time") {
      const from = this.recording.timeOf(first), until = this.recording.timeOf(last);
      for (let i = 1; i < columns; i++) {
        const state = this.recording.stateAt(from + ((until - from) * i) / columns);
        if (state > edges[edges.length - 1] && state < last) edges.push(state);
      }
    } else {
      const count = Math.min(columns, last - first);
      for (let i = 1; i < count; i++) edges.push(first + Math.floor(((last - first) * i) / count));
    }
    edges.push(last);
    return edges;
  }

  data() {
    const { recording } = this;
    if (!recording.decoded) return this.overviewData();
    const edges = this.edges();
    const columns = recording.columns(this.levels, edges);
    const curves = recording.curves.map((_, i) => recording.curveColumns(i, edges));
    const xs = Array.from(edges, (state) => this.xOf(state));
    this.edgesShown = edges;
    return this.stacked(xs, columns, curves);
  }

  overviewData() {
    const { bins } = this.head;
    const [first, last] = this.view;
    const from = Math.floor(first / bins.step);
    const until = Math.max(from + 1, Math.ceil(last / bins.step));
    const cut = (values) => Float64Array.from(values.slice(from, until));
    const columns = { min: cut(bins.min), max: cut(bins.max), at: [], groups: bins.categories.map(cut) };
    const edges = Array.from(columns.max, (_, i) => (from + i) * bins.step);
    columns.at = edges.slice();
    edges.push(Math.min(this.recording.states, until * bins.step));
    this.edgesShown = edges;
    return this.stacked(edges.map((state) => state - 1), columns, bins.curves.map(cut));
  }

  // Sums from the bottom up, so that each area ends where the next one begins.
  stacked(xs, columns, curves) {
    this.columnsShown = columns;
    this.curvesShown = curves;
    // A last point ends the last step.
    const closed = (values) => {
      const out = new Float64Array(values.length + 1);
      out.set(values);
      out[values.length] = values[values.length - 1];
      return out;
    };
    let below = null;
    const areas = columns.groups.map((values, group) => {
      const sum = closed(values);
      if (this.hidden.has(`group ${group}`)) sum.fill(0);
      if (below) for (let i = 0; i < sum.length; i++) sum[i] += below[i];
      below = sum;
      return sum;
    });
    return [xs, ...areas, closed(columns.min), ...curves.map(closed)];
  }

  // --- drawing ---

  plotWidth() {
    return this.plot ? this.plot.bbox.width / devicePixelRatio : this.box.clientWidth - 80;
  }

  size() {
    const width = Math.max(200, this.box.clientWidth);
    return { width, height: width < 600 ? 260 : 340 };
  }

  make() {
    if (this.plot) this.plot.destroy();
    const { head } = this;
    const stepped = uPlot.paths.stepped({ align: 1 });
    const series = [{}];
    const bands = [];
    let below = 0;
    this.groupNames.forEach((name, group) => {
      const show = this.isUsed(group);
      series.push({ label: "area", fill: this.groupColours[group], stroke: null, width: 0, paths: stepped, points: { show: false }, show });
      if (!show) return;
      if (below > 0) bands.push({ series: [group + 1, below], fill: this.groupColours[group] });
      below = group + 1;
    });
    series.push({ label: "least", stroke: css("--least"), width: 1, paths: stepped, points: { show: false } });
    head.curves.forEach((curve, i) => {
      const { colour, dash } = LINES[curve.kind] || LINES.torch;
      series.push({
        label: "curve", stroke: css(colour), width: 1.75, dash, paths: stepped, points: { show: false },
        show: !this.hidden.has(`curve ${i}`),
      });
    });
    const axis = { stroke: css("--soft"), grid: { stroke: css("--grid"), width: 1 }, ticks: { stroke: css("--grid"), width: 1, size: 5 }, font: "12px system-ui, sans-serif" };
    const narrow = this.box.clientWidth < 600;
    const options = {
      ...this.size(),
      series,
      bands,
      legend: { show: false },
      padding: [10, 36, 0, 0],
      cursor: { y: false, drag: { x: true, y: false, setScale: false }, points: { show: false } },
      scales: {
        x: { time: false, range: () => this.range() },
        y: { range: (u, min, max) => this.heights(min, max) },
      },
      axes: [
        { ...axis, space: narrow ? 70 : 110, values: (u, ticks) => ticks.map((tick) => this.xText(tick)) },
        { ...axis, size: narrow ? 64 : 74, splits: binaryTicks, values: (u, ticks) => ticks.map((tick) => tickText(tick, u.scales.y.max)) },
      ],
      hooks: {
        draw: [() => this.drawMarks()],
        setSelect: [() => this.selected()],
        setCursor: [() => this.pointed()],
      },
    };
    this.plot = new uPlot(options, this.data(), this.box);
    this.plot.over.addEventListener("click", (event) => this.clicked(event));
    this.makeLegend();
    this.drawStrip();
  }

  range() {
    return [this.xOf(this.view[0]), this.xOf(this.view[1])];
  }

  heights(min, max) {
    if (this.fit && max > min) {
      let low = Infinity;
      for (const bytes of this.columnsShown.min) low = Math.min(low, bytes);
      const space = (max - low) * 0.06 || 1;
      return [Math.max(0, low - space), max + space];
    }
    return [0, (max || 1) * 1.05];
  }

  xText(tick) {
    if (this.axis === "time") return secondsText(tick).replace(/\.?0+ /, " ");
    if (tick < 0) return tick === -1 ? "start" : "";
    return Number.isInteger(tick) ? countText(tick) : "";
  }

  // Draws on the next frame, however many changes there are before.
  redraw() {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => {
      this.pending = 0;
      this.plot.setData(this.data(), true);
      this.box.dataset.view = `${this.view[0]} ${this.view[1]}`;
      this.drawStrip();
      this.showReadout(this.column);
    });
  }

  drawMarks() {
    const { plot, head } = this;
    const { ctx, bbox } = plot;
    const x = (state) => plot.valToPos(this.xOf(state), "x", true);
    const within = (at) => at >= bbox.left - 1 && at <= bbox.left + bbox.width + 1;
    const ratio = devicePixelRatio;
    ctx.save();
    ctx.lineWidth = ratio;
    ctx.strokeStyle = css("--mark");
    let before = -Infinity;
    for (const [state] of head.marks) {
      const at = x(state);
      // One tick for each pixel is all that can be seen.
      if (!within(at) || at - before < ratio) continue;
      before = at;
      ctx.beginPath();
      ctx.moveTo(at, bbox.top);
      ctx.lineTo(at, bbox.top + 10 * ratio);
      ctx.stroke();
    }
    ctx.strokeStyle = ctx.fillStyle = css("--bad");
    ctx.lineWidth = 1.5 * ratio;
    for (const failure of head.failures) {
      const at = x(failure.state);
      if (!within(at)) continue;
      ctx.beginPath();
      ctx.moveTo(at, bbox.top);
      ctx.lineTo(at, bbox.top + bbox.height);
      ctx.stroke();
      ctx.beginPath();
      ctx.moveTo(at - 5 * ratio, bbox.top);
      ctx.lineTo(at + 5 * ratio, bbox.top);
      ctx.lineTo(at, bbox.top + 8 * ratio);
      ctx.fill();
    }
    // The moment: from its event to the next one, at least a line.
    const state = this.app.state;
    const from = x(state), until = x(state + 1);
    if (until >= bbox.left && from <= bbox.left + bbox.width) {
      ctx.fillStyle = css("--moment");
      const left = Math.max(from, bbox.left);
      const width = Math.min(until, bbox.left + bbox.width) - left;
      if (width > 3 * ratio) {
        ctx.globalAlpha = 0.18;
        ctx.fillRect(left, bbox.top, width, bbox.height);
        ctx.globalAlpha = 1;
      }
      ctx.fillRect(left - ratio, bbox.top, 2 * ratio, bbox.height);
    }
    ctx.restore();
  }

  // The whole run in small, with the part that the timeline shows.
  drawStrip() {
    const { strip } = this;
    const ratio = devicePixelRatio;
    const { clientWidth: width, clientHeight: height } = strip;
    const key = `${this.recording.part} ${width} ${ratio} ${css("--strip")}`;
    if (this.stripKey !== key) {
      this.stripKey = key;
      this.stripImage = this.stripOf(width, height, ratio);
      strip.width = this.stripImage.width;
      strip.height = this.stripImage.height;
    }
    const ctx = strip.getContext("2d");
    ctx.setTransform(1, 0, 0, 1, 0, 0);
    ctx.clearRect(0, 0, strip.width, strip.height);
    ctx.drawImage(this.stripImage, 0, 0);
    ctx.scale(ratio, ratio);
    const x = (state) => (state / this.recording.states) * width;
    const [first, last] = this.view;
    ctx.fillStyle = css("--shade");
    ctx.fillRect(0, 0, x(first), height);
    ctx.fillRect(x(last), 0, width - x(last), height);
    ctx.strokeStyle = css("--accent");
    ctx.lineWidth = 1.5;
    ctx.strokeRect(x(first) + 0.75, 0.75, Math.max(2, x(last) - x(first) - 1.5), height - 1.5);
  }

  stripOf(width, height, ratio) {
    const image = element("canvas");
    image.width = Math.max(1, width * ratio);
    image.height = Math.max(1, height * ratio);
    const ctx = image.getContext("2d");
    ctx.scale(ratio, ratio);
    const { bins } = this.head;
    const most = bins.max.reduce((a, b) => Math.max(a, b), 1);
    const step = (width * bins.step) / this.recording.states;
    ctx.fillStyle = css("--strip");
    for (let bin = 0; bin < bins.max.length; bin++) {
      const tall = (bins.max[bin] / most) * (height - 2);
      ctx.fillRect(bin * step, height - tall, step + 0.5, tall);
    }
    return image;
  }

  makeLegend() {
    this.legend.replaceChildren();
    this.legendValues = [];
    const item = (key, name, colour, kind) => {
      const button = document.createElement("button");
      button.type = "button";
      button.setAttribute("aria-pressed", String(!this.hidden.has(key)));
      const swatch = document.createElement("i");
      swatch.className = kind;
      swatch.style.setProperty("--swatch", colour);
      const label = document.createElement("span");
      label.className = "name";
      label.textContent = name;
      const value = document.createElement("span");
      value.className = "value";
      button.append(swatch, label, value);
      button.addEventListener("click", () => {
        if (!this.hidden.delete(key)) this.hidden.add(key);
        button.setAttribute("aria-pressed", String(!this.hidden.has(key)));
        const [what, index] = key.split(" ");
        if (what === "curve") this.plot.setSeries(this.groupNames.length + 2 + Number(index), { show: !this.hidden.has(key) });
        this.redraw();
      });
      const entry = document.createElement("li");
      entry.append(button);
      this.legend.append(entry);
      return value;
    };
    this.head.curves.forEach((curve, i) => {
      const { colour, dash } = LINES[curve.kind] || LINES.torch;
      const value = item(`curve ${i}`, curve.label, css(colour), ["line", "line dotted", "line dashed"][dash.length ? (dash[0] > 2 ? 2 : 1) : 0]);
      this.legendValues.push((column) => (value.textContent = bytesText(this.curvesShown[i][column])));
    });
    this.groupNames.forEach((name, group) => {
      if (!this.isUsed(group)) return;
      const value = item(`group ${group}`, name, this.groupColours[group], "area");
      this.legendValues.push((column) => (value.textContent = bytesText(this.columnsShown.groups[group][column])));
    });
    this.showReadout(null);
  }

  isUsed(group) {
    if (!this.recording.decoded) return this.head.bins.categories[group]?.some((bytes) => bytes > 0);
    for (let i = group; i < this.levels.atMost.length; i += this.levels.groups) if (this.levels.atMost[i] > 0) return true;
    return false;
  }

  // --- pointing ---

  pointed() {
    const { left } = this.plot.cursor;
    this.column = left >= 0 ? this.columnAt(left) : null;
    this.showReadout(this.column);
  }

  columnAt(left) {
    const x = this.plot.posToVal(left, "x");
    const state = this.axis === "time" ? this.recording.stateAt(x) : Math.floor(x) + 1;
    return Math.max(0, Math.min(this.columnsShown.max.length - 1, above(this.edgesShown, state) - 1));
  }

  showReadout(column) {
    const { columnsShown: shown, edgesShown: edges, head } = this;
    let place = "Whole run. ";
    if (column === null || column === undefined || column >= shown.max.length) {
      const state = this.app.state;
      column = Math.max(0, Math.min(shown.max.length - 1, above(edges, state) - 1));
      place = "";
    }
    const first = edges[column], last = edges[column + 1] - 1;
    const at = shown.at[column];
    const event = (state) => (state === 0 ? "before the first event" : `event ${countText(state - 1)}`);
    const range = first === last ? event(first) : `events ${countText(Math.max(0, first - 1))} to ${countText(last - 1)}`;
    const bytes = first === last || shown.min[column] === shown.max[column]
      ? bytesText(shown.max[column])
      : `${bytesText(shown.min[column])} to ${bytesText(shown.max[column])}, most at ${event(at)}`;
    place = range[0].toUpperCase() + range.slice(1);
    const time = this.recording.hasTimes ? ` (${secondsText(this.recording.timeOf(at))})` : "";
    const marks = head.marks.filter(([state]) => state >= first && state <= last);
    const named = marks.slice(0, 3).map(([, text]) => text).join("; ");
    const more = marks.length > 3 ? ` and ${marks.length - 3} more` : "";
    const failed = head.failures.find((failure) => failure.state >= first && failure.state <= last);
    const failure = failed ? ` Out of memory: ${bytesText(failed.size)} requested.` : "";
    this.readout.textContent = `${place}${time}: ${bytes} allocated.${failure}${named ? ` Marks: ${named}${more}.` : ""}`;
    this.legendValues?.forEach((show) => show(column));
  }

  clicked(event) {
    if (this.wasSelection) {
      this.wasSelection = false;
      return;
    }
    const box = this.plot.over.getBoundingClientRect();
    const column = this.columnAt(event.clientX - box.left);
    this.app.setState(this.columnsShown.at[column]);
  }

  selected() {
    const { left, width } = this.plot.select;
    if (width < 4) return;
    this.wasSelection = true;
    setTimeout(() => (this.wasSelection = false), 0);
    const stateOf = (position) => {
      const x = this.plot.posToVal(position, "x");
      return this.axis === "time" ? this.recording.stateAt(x) : x + 1;
    };
    this.plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.zoomTo(stateOf(left), stateOf(left + width));
  }

  // --- moving ---

  // Shows the states from `first` to before `last`: at least one, at most all.
  zoomTo(first, last) {
    const { states } = this.recording;
    const least = this.recording.decoded ? 1 : this.head.bins.step;
    let count = Math.min(states, Math.max(least, Math.round(last - first)));
    let from = Math.round(Math.max(0, Math.min(states - count, first)));
    if (!this.recording.decoded) {
      from = Math.floor(from / least) * least;
      count = Math.min(states - from, Math.ceil(count / least) * least);
    }
    this.view = [from, from + count];
    this.redraw();
  }

  zoomAt(state, factor) {
    const [first, last] = this.view;
    const count = last - first;
    let wanted = count * factor;
    if (factor > 1) wanted = Math.max(wanted, count + 1);
    const part = (state - first) / count;
    this.zoomTo(state - part * wanted, state - part * wanted + wanted);
    if (Math.round(wanted) <= 1) this.zoomTo(Math.floor(state), Math.floor(state) + 1);
  }

  pan(part) {
    const [first, last] = this.view;
    const count = last - first;
    const by = Math.sign(part) * Math.max(1, Math.round(Math.abs(part) * count));
    this.zoomTo(first + by, first + by + count);
  }

  middle() {
    // The moment, if it can be seen, else the middle of the view.
    const [first, last] = this.view;
    const { state } = this.app;
    return state >= first && state < last ? state + 0.5 : (first + last) / 2;
  }

  command(name) {
    if (name === "in") this.zoomAt(this.middle(), 0.5);
    else if (name === "out") this.zoomAt(this.middle(), 2);
    else if (name === "left") this.pan(-0.25);
    else if (name === "right") this.pan(0.25);
    else if (name === "all") this.zoomTo(0, this.recording.states);
    else if (name === "closer") this.zoomTo(this.app.state, this.app.state + 1);
    else return false;
    return true;
  }

  listen() {
    this.box.addEventListener("wheel", (event) => {
      event.preventDefault();
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        this.pan((event.deltaX || event.deltaY) / 1000);
        return;
      }
      const box = this.plot.over.getBoundingClientRect();
      const part = Math.max(0, Math.min(1, (event.clientX - box.left) / box.width));
      const [first, last] = this.view;
      let state = first + part * (last - first);
      if (this.axis === "time") state = this.recording.stateAt(this.plot.posToVal(event.clientX - box.left, "x"));
      this.zoomAt(state, Math.exp(Math.max(-200, Math.min(200, event.deltaY)) * 0.0035));
    }, { passive: false });
    this.box.addEventListener("keydown", (event) => {
      const commands = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", Home: "all", 0: "all" };
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (commands[event.key]) this.command(commands[event.key]);
      else if (event.key === ",") this.app.setState(this.app.state - 1);
      else if (event.key === ".") this.app.setState(this.app.state + 1);
      else if (event.key === "Enter") this.app.setState(Math.floor((this.view[0] + this.view[1]) / 2));
      else return;
      event.preventDefault();
    });
    let dragged = false;
    const follow = (event) => {
      const box = this.strip.getBoundingClientRect();
      const state = ((event.clientX - box.left) / box.width) * this.recording.states;
      const count = this.view[1] - this.view[0];
      this.zoomTo(state - count / 2, state + count / 2);
    };
    this.strip.addEventListener("pointerdown", (event) => {
      dragged = true;
      this.strip.setPointerCapture(event.pointerId);
      follow(event);
    });
    this.strip.addEventListener("pointermove", (event) => dragged && follow(event));
    this.strip.addEventListener("pointerup", () => (dragged = false));
    new ResizeObserver(() => {
      if (!this.plot || !this.box.clientWidth) return;
      const { width, height } = this.size();
      if (width === this.plot.width && height === this.plot.height) return;
      this.plot.setSize({ width, height });
      this.redraw();
    }).observe(this.box);
  }
}

function paletteColours() {
  return Array.from({ length: 9 }, (_, i) => css(`--c${i}`));
}
