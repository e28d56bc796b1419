// What holds the memory at one moment: the flame graph, the largest blocks and the address map.

const ROW = 20;
const BLOCKS_SHOWN = 50;
const SEGMENTS_SHOWN = 40;
const CELLS_SHOWN = 3000;

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

class FlameGraph {
  constructor(app) {
    this.app = app;
    this.box = document.getElementById("flame");
    this.details = document.getElementById("frame");
    this.search = document.getElementById("search");
    this.found = document.getElementById("found");
    this.unzoom = document.getElementById("unzoom");
    this.term = "";
    this.search.addEventListener("input", () => {
      this.term = this.search.value.trim().toLowerCase();
      this.draw();
    });
    this.unzoom.addEventListener("click", () => this.zoom(this.root));
    this.box.addEventListener("click", (event) => {
      const node = this.nodeOf(event.target);
      if (node) this.zoom(node);
    });
    this.box.addEventListener("pointerover", (event) => {
      const node = this.nodeOf(event.target);
      if (node) this.describe(node);
    });
    this.box.addEventListener("pointerleave", () => this.describe(this.focused));
    this.box.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => {
      if (this.root && this.box.clientWidth !== this.width) this.draw();
    }).observe(this.box);
  }

  nodeOf(target) {
    const cell = target.closest?.(".cell");
    return cell ? this.cells.get(cell) : null;
  }

  // Builds the tree of the frames of live blocks. O(blocks + nodes).
  show(recording, live) {
    this.recording = recording;
    const nodes = recording.nodeParent.length;
    const bytes = new Float64Array(nodes);
    const blocks = new Uint32Array(nodes);
    const split = new Map();
    for (const block of live) {
      const site = recording.site[block];
      const stack = recording.siteStack[site];
      const node = stack < 0 ? 0 : recording.stackNode[stack];
      bytes[node] += recording.size[block];
      blocks[node]++;
      const key = node * 16 + recording.siteCategory[site];
      split.set(key, (split.get(key) || 0) + recording.size[block]);
    }
    const own = bytes.slice();
    // A parent comes before its children.
    for (let node = nodes - 1; node > 0; node--) {
      bytes[recording.nodeParent[node]] += bytes[node];
      blocks[recording.nodeParent[node]] += blocks[node];
    }
    const largest = new Map();
    for (const [key, size] of split) {
      const node = Math.floor(key / 16);
      if (!largest.has(node) || largest.get(node)[1] < size) largest.set(node, [key % 16, size]);
    }
    const made = new Array(nodes);
    const make = (node) => ({ node, name: node ? recording.frames[recording.nodeFrame[node]] : "all live blocks", bytes: bytes[node], blocks: blocks[node], own: own[node], children: [] });
    made[0] = make(0);
    for (let node = 1; node < nodes; node++) {
      if (bytes[node] <= 0) continue;
      made[node] = make(node);
      made[recording.nodeParent[node]].children.push(made[node]);
    }
    for (const [node, [category]] of largest) if (made[node]) made[node].category = category;
    if (own[0] > 0 && made[0].children.length > 0) {
      made[0].children.push({ node: -1, name: "no stack recorded", bytes: own[0], own: own[0], children: [], category: made[0].category });
    }
    const root = d3.hierarchy(made[0]);
    root.each((node) => (node.value = node.data.bytes));
    // The colour of a frame is that of the category with the most bytes below it.
    root.eachAfter((node) => {
      node.split = new Map();
      if (node.data.own > 0 && node.data.category !== undefined) node.split.set(node.data.category, node.data.own);
      for (const child of node.children || []) {
        for (const [category, size] of child.split) node.split.set(category, (node.split.get(category) || 0) + size);
      }
      node.category = [...node.split].sort((a, b) => b[1] - a[1])[0]?.[0];
    });
    root.sort((a, b) => b.value - a.value);
    d3.partition()(root);
    this.root = root;
    this.zoomed = root;
    this.focused = root;
    this.draw();
  }

  matches(node) {
    return this.term && node.depth > 0 && node.data.name.toLowerCase().includes(this.term);
  }

  draw() {
    const { root, zoomed, box } = this;
    this.width = box.clientWidth;
    const scale = this.width / (zoomed.x1 - zoomed.x0 || 1);
    const palette = paletteColours();
    const cells = document.createDocumentFragment();
    this.cells = new Map();
    this.byNode = new Map();
    this.order = [];
    let deepest = 0;
    let hidden = 0;
    const place = (node) => {
      const isAbove = node.depth < zoomed.depth;
      const left = isAbove ? 0 : (node.x0 - zoomed.x0) * scale;
      const width = isAbove ? this.width : (node.x1 - node.x0) * scale;
      if (width < 1.5 || this.order.length >= CELLS_SHOWN) {
        hidden++;
        return;
      }
      const cell = element("div", "cell");
      cell.style.left = `${left}px`;
      cell.style.top = `${node.depth * ROW}px`;
      cell.style.width = `${Math.max(1, width - 1)}px`;
      if (node.depth > 0 && node.category !== undefined) {
        cell.style.setProperty("--cell", palette[node.category % palette.length]);
        // Neighbours of one category differ a little.
        cell.style.setProperty("--tint", `${28 + ((node.data.node * 7) % 5) * 5}%`);
      } else {
        cell.classList.add("root");
      }
      if (isAbove) cell.classList.add("above");
      if (this.matches(node)) cell.classList.add("match");
      else if (this.term) cell.classList.add("faded");
      if (width > 28) cell.textContent = node.data.name;
      this.cells.set(cell, node);
      this.byNode.set(node, cell);
      this.order.push(node);
      cells.append(cell);
      deepest = Math.max(deepest, node.depth);
      if (!isAbove) (node.children || []).forEach(place);
    };
    zoomed.ancestors().slice(1).reverse().forEach(place);
    place(zoomed);
    box.replaceChildren(cells);
    box.style.height = `${(deepest + 1) * ROW}px`;
    this.unzoom.disabled = zoomed === root;
    if (this.term) {
      let bytes = 0;
      // A frame inside of one that matches counts once.
      const add = (node) => {
        if (this.matches(node)) bytes += node.value;
        else (node.children || []).forEach(add);
      };
      add(root);
      const part = root.value > 0 ? (100 * bytes) / root.value : 0;
      this.found.textContent = `${bytesText(bytes)} (${part.toFixed(1)} %) in frames that match`;
    } else {
      this.found.textContent = "";
    }
    this.describe(this.focused);
  }

  describe(node) {
    if (!node) return;
    const { data } = node;
    const part = this.root.value > 0 ? (100 * node.value) / this.root.value : 0;
    const own = data.own > 0 && data.children.length > 0 ? `, ${bytesText(data.own)} of it by this frame itself` : "";
    const blocks = data.blocks ? ` in ${counted(data.blocks, "block")}` : "";
    this.details.textContent = `${data.name}: ${bytesText(node.value)} (${part.toFixed(1)} %)${blocks}${own}`;
  }

  zoom(node) {
    this.zoomed = node;
    this.focus(node, true);
  }

  focus(node, redraw) {
    if (redraw) {
      this.focused = node;
      this.draw();
    }
    this.byNode.get(this.focused)?.classList.remove("focused");
    this.focused = node;
    this.byNode.get(node)?.classList.add("focused");
    this.describe(node);
  }

  key(event) {
    const { focused } = this;
    const shown = (node) => node && this.byNode.has(node);
    const beside = (step) => {
      const siblings = this.order.filter((node) => node.depth === focused.depth);
      return siblings[siblings.indexOf(focused) + step];
    };
    const next = {
      ArrowDown: () => focused.children?.find(shown),
      ArrowUp: () => focused.parent,
      ArrowRight: () => beside(1),
      ArrowLeft: () => beside(-1),
    }[event.key];
    if (next) {
      const node = next();
      if (shown(node)) this.focus(node, false);
    } else if (event.key === "Enter" || event.key === " ") this.zoom(focused);
    else if (event.key === "Escape") this.zoom(this.root);
    else return;
    event.preventDefault();
  }
}

// The rows of the largest live blocks.
function showBlocks(app, recording, live) {
  const body = document.querySelector("#blocks tbody");
  const largest = live.slice().sort((a, b) => recording.size[b] - recording.size[a]).slice(0, BLOCKS_SHOWN);
  body.replaceChildren(...largest.map((block) => {
    const site = recording.site[block];
    const row = element("tr");
    const number = (text) => element("td", "number", text);
    const swatch = element("i", "area");
    swatch.style.setProperty("--swatch", paletteColours()[recording.siteCategory[site] % 9]);
    const category = element("td");
    category.append(swatch, recording.head.categories[recording.siteCategory[site]]);
    const stack = recording.siteStack[site];
    const by = element("td", "stack");
    const frames = app.stackFrames(stack);
    if (frames.length > 1) {
      const details = element("details");
      details.append(element("summary", "", app.stackTitle(stack)));
      const list = element("ol");
      list.append(...frames.slice().reverse().map((frame) => element("li", "", frame)));
      details.append(list);
      by.append(details);
    } else {
      by.textContent = app.stackName(stack);
    }
    row.append(number(bytesText(recording.size[block])), category, number(app.eventText(recording.from[block])),
      number(recording.until[block] === NEVER ? "never" : app.eventText(recording.until[block])),
      number(recording.head.streams[recording.siteStream[site]] || ""), by);
    return row;
  }));
}

class AddressMap {
  constructor(app) {
    this.app = app;
    this.box = document.getElementById("map");
    this.text = document.getElementById("map-text");
    this.hover = document.getElementById("map-hover");
    this.order = document.getElementById("map-order");
    this.pins = document.getElementById("pins");
    this.legend = document.getElementById("map-legend");
    this.order.addEventListener("change", () => this.draw());
    this.scale = document.getElementById("map-scale");
    this.scale.addEventListener("change", () => this.draw());
    new ResizeObserver(() => {
      if (this.segments && this.box.clientWidth !== this.width) this.draw();
    }).observe(this.box);
  }

  // The segments at a moment with their blocks. O(blocks + segment changes).
  show(recording, state, live) {
    this.recording = recording;
    const placed = live.filter((block) => recording.address[block] > 0);
    // A freed block whose uses are not complete keeps its place.
    const end = above(recording.from, state);
    for (let block = 0; block < end; block++) {
      const { until, done, address } = recording;
      if (until[block] <= state && done[block] > state && done[block] !== NEVER && address[block] > 0) placed.push(block);
    }
    placed.sort((a, b) => recording.address[a] - recording.address[b]);
    let ranges = recording.reservedRanges(state);
    this.inferred = ranges.length === 0;
    if (this.inferred) ranges = this.rangesOf(placed);
    let next = 0;
    this.outside = 0;
    this.segments = [];
    for (const [start, until] of merged(ranges)) {
      while (next < placed.length && recording.address[placed[next]] < start) {
        this.outside += recording.size[placed[next++]];
      }
      const blocks = [];
      while (next < placed.length && recording.address[placed[next]] < until) blocks.push(placed[next++]);
      this.segments.push(this.segment(start, until, blocks));
    }
    while (next < placed.length) this.outside += recording.size[placed[next++]];
    this.unplaced = live.length - live.filter((block) => recording.address[block] > 0).length;
    this.draw();
  }

  segment(start, end, blocks) {
    const { recording } = this;
    const size = end - start;
    let used = 0, at = start, hole = 0;
    for (const block of blocks) {
      const address = recording.address[block];
      hole = Math.max(hole, address - at);
      at = Math.max(at, Math.min(end, address + recording.size[block]));
      used += Math.min(recording.size[block], end - address);
    }
    hole = Math.max(hole, end - at);
    return { start, end, size, blocks, used: Math.min(used, size), free: Math.max(0, size - used), hole };
  }

  // Without recorded segments: blocks less than 2 MiB apart are in one row.
  rangesOf(blocks) {
    const ranges = [];
    const gap = 2 ** 21;
    for (const block of blocks) {
      const start = this.recording.address[block];
      const end = start + this.recording.size[block];
      const last = ranges[ranges.length - 1];
      if (last && start - last[1] < gap) last[1] = Math.max(last[1], end);
      else ranges.push([start, end]);
    }
    return ranges;
  }

  draw() {
    const { recording, segments, box } = this;
    this.width = box.clientWidth;
    const sum = (of) => segments.reduce((total, segment) => total + of(segment), 0);
    const reserved = sum((s) => s.size), free = sum((s) => s.free);
    const hole = segments.reduce((most, s) => Math.max(most, s.hole), 0);
    const part = reserved > 0 ? ((100 * free) / reserved).toFixed(1) : "0.0";
    let text = `${counted(segments.length, this.inferred ? "range" : "segment")}, ${bytesText(reserved)} in all. ${bytesText(free)} of it (${part} %) is outside of blocks: holes and rounding; the largest hole has ${bytesText(hole)}.`;
    if (this.inferred) text = segments.length ? `The recording has no segments, so these are the addresses of its blocks. ${text}` : "The recording has no addresses at this moment.";
    if (this.unplaced > 0) text += ` ${countText(this.unplaced)} blocks have no address here: the page has them at the peak, at failures and at the end.`;
    if (this.outside > 0) text += ` ${bytesText(this.outside)} of blocks are outside of every known segment.`;
    this.text.textContent = text;
    const order = { free: (a, b) => b.free - a.free, size: (a, b) => b.size - a.size, address: (a, b) => a.start - b.start }[this.order.value];
    const sorted = segments.slice().sort(order);
    const shown = sorted.slice(0, SEGMENTS_SHOWN);
    const most = shown.reduce((found, segment) => Math.max(found, segment.size), 1);
    box.replaceChildren(...shown.map((segment) => this.row(segment, this.scale.value === "equal" ? segment.size : most)));
    if (sorted.length > shown.length) {
      const rest = sorted.slice(shown.length);
      const bytes = rest.reduce((total, segment) => total + segment.size, 0);
      const holes = rest.reduce((total, segment) => total + segment.free, 0);
      box.append(element("p", "note", `and ${counted(rest.length, "more segment")}: ${bytesText(bytes)}, ${bytesText(holes)} of it outside of blocks`));
    }
    this.showPins(segments);
    const used = new Set(segments.flatMap((segment) => segment.blocks.map((block) => recording.siteCategory[recording.site[block]])));
    const palette = paletteColours();
    this.legend.replaceChildren(...[...used].sort((a, b) => a - b).map((category) => {
      const item = element("li");
      const swatch = element("i", "area");
      swatch.style.setProperty("--swatch", palette[category % 9]);
      item.append(swatch, recording.head.categories[category]);
      return item;
    }), (() => {
      const item = element("li");
      item.append(element("i", "area hole"), "free");
      return item;
    })());
  }

  row(segment, whole) {
    const { recording } = this;
    const row = element("div", "segment");
    const label = element("span", "label", `${bytesText(segment.size)}`);
    const note = element("span", "note", segment.free > 0 ? `${bytesText(segment.free)} free` : "full");
    const holder = element("div", "bar");
    const canvas = element("canvas");
    const ratio = devicePixelRatio;
    const labels = this.width < 600 ? 0 : 210;
    const width = Math.max(6, Math.round((this.width - labels - 8) * (segment.size / whole)));
    const height = 18;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `Segment at 0x${segment.start.toString(16)}: ${bytesText(segment.size)}, ${counted(segment.blocks.length, "block")}, ${bytesText(segment.free)} free`);
    const ctx = canvas.getContext("2d");
    ctx.scale(ratio, ratio);
    ctx.fillStyle = css("--hole");
    ctx.fillRect(0, 0, width, height);
    const palette = paletteColours();
    const scale = width / segment.size;
    for (const block of segment.blocks) {
      const left = (recording.address[block] - segment.start) * scale;
      const wide = recording.size[block] * scale;
      ctx.fillStyle = palette[recording.siteCategory[recording.site[block]] % 9];
      ctx.globalAlpha = recording.until[block] <= this.app.state ? 0.45 : 1;
      ctx.fillRect(left, 0, Math.max(0.6, wide - (wide > 4 ? 0.6 : 0)), height);
    }
    canvas.addEventListener("pointermove", (event) => {
      const address = segment.start + (event.offsetX / width) * segment.size;
      const index = above(segment.blocks.map((block) => recording.address[block]), address) - 1;
      const block = segment.blocks[index];
      const inside = block !== undefined && address < recording.address[block] + Math.max(recording.size[block], segment.size / width);
      this.hover.textContent = inside
        ? `${bytesText(recording.size[block])} at 0x${recording.address[block].toString(16)}, ${recording.head.categories[recording.siteCategory[recording.site[block]]]}, allocated at ${this.app.eventText(recording.from[block])} by ${this.app.stackName(recording.siteStack[recording.site[block]])}`
        : `free, at 0x${Math.floor(address).toString(16)}`;
    });
    holder.append(canvas);
    row.append(label, holder, note);
    return row;
  }

  // Segments that are nearly empty, and the blocks that keep them.
  showPins(segments) {
    const { recording } = this;
    const pinned = segments.filter((segment) => segment.blocks.length > 0 && segment.used < segment.size / 10 && segment.size >= 2 ** 20);
    pinned.sort((a, b) => b.free - a.free);
    this.pins.replaceChildren();
    if (this.inferred) return;
    this.pins.append(element("h4", "", "Small blocks that keep large segments"));
    if (pinned.length === 0) {
      this.pins.append(element("p", "note", "No segment is less than a tenth full."));
      return;
    }
    const kept = pinned.reduce((total, segment) => total + segment.free, 0);
    this.pins.append(element("p", "note", `Less than a tenth full: ${counted(pinned.length, "segment")}. Their blocks keep ${bytesText(kept)} from being returned to the card.`));
    const table = element("table");
    const head = element("tr");
    for (const [name, numeric] of [["segment", true], ["kept free", true], ["blocks", true], ["largest block", true], ["allocated by", false]]) {
      const cell = element("th", numeric ? "number" : "", name);
      cell.scope = "col";
      head.append(cell);
    }
    const thead = element("thead");
    thead.append(head);
    const body = element("tbody");
    for (const segment of pinned.slice(0, 20)) {
      const block = segment.blocks.reduce((a, b) => (recording.size[b] > recording.size[a] ? b : a));
      const row = element("tr");
      row.append(element("td", "number", bytesText(segment.size)), element("td", "number", bytesText(segment.free)),
        element("td", "number", countText(segment.blocks.length)), element("td", "number", bytesText(recording.size[block])),
        element("td", "stack", this.app.stackName(recording.siteStack[recording.site[block]])));
      body.append(row);
    }
    table.append(thead, body);
    const scroll = element("div", "scroll");
    scroll.tabIndex = 0;
    scroll.setAttribute("role", "region");
    scroll.setAttribute("aria-label", "Small blocks that keep large segments");
    scroll.append(table);
    this.pins.append(scroll);
  }
}

// Adjacent parts of an expandable segment become one row.
function merged(ranges) {
  const out = [];
  for (const [start, end, isPart] of ranges) {
    const last = out[out.length - 1];
    if (last && last[1] === start && (isPart || last[2])) {
      last[1] = end;
      last[2] = true;
    } else {
      out.push([start, end, isPart]);
    }
  }
  return out;
}
