"use strict";
// Decodes the columns of a part into arrays. The Rust module `encode` says what each column holds.
//
// A state is what holds after an event. State 0 holds before the first event. So event `e` of the
// device leads to state `e + 1`, which the timeline draws from `e` to `e + 1`.

const NEVER = 0xffffffff;
const BUCKET = 64;

async function inflated(part, name) {
  const element = document.getElementById(`column-${part}-${name}`);
  if (!element) return new Uint8Array(0);
  const text = element.textContent;
  let packed;
  if (Uint8Array.fromBase64) {
    packed = Uint8Array.fromBase64(text);
  } else {
    const binary = atob(text);
    packed = new Uint8Array(binary.length);
    for (let i = 0; i < binary.length; i++) packed[i] = binary.charCodeAt(i);
  }
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

class Reader {
  constructor(bytes) {
    this.bytes = bytes;
    this.at = 0;
  }
  get more() {
    return this.at < this.bytes.length;
  }
  byte() {
    return this.bytes[this.at++];
  }
  number() {
    const bytes = this.bytes;
    let byte = bytes[this.at++];
    if (byte < 0x80) return byte;
    let value = byte & 0x7f;
    let shift = 7;
    // Up to 28 bits as an integer.
    while (shift < 28) {
      byte = bytes[this.at++];
      value |= (byte & 0x7f) << shift;
      if (byte < 0x80) return value;
      shift += 7;
    }
    let factor = 2 ** 28;
    do {
      byte = bytes[this.at++];
      value += (byte & 0x7f) * factor;
      factor *= 128;
    } while (byte >= 0x80);
    return value;
  }
  step(before) {
    return before + unzigzag(this.number());
  }
}

function unzigzag(number) {
  return number % 2 === 0 ? number / 2 : -(number + 1) / 2;
}

// The first index in `sorted[from..until]` whose value is greater than `value`.
function above(sorted, value, from = 0, until = sorted.length) {
  while (from < until) {
    const middle = (from + until) >>> 1;
    if (sorted[middle] > value) until = middle;
    else from = middle + 1;
  }
  return from;
}

class Recording {
  // Before the columns are decoded there is only the head, with the overview's bins.
  constructor(head, part) {
    this.head = head;
    this.part = part;
    this.states = head.events + 1;
    this.decoded = false;
  }

  async decode() {
    const head = this.head;
    if (head.kept === "bins") return;
    const names = head.columns;
    const packed = await Promise.all(names.map((name) => inflated(this.part, name)));
    const bytes = Object.fromEntries(names.map((name, i) => [name, packed[i]]));
    this.decodeTables(bytes);
    this.decodeEvents(bytes);
    this.decodeTimes(bytes.time);
    this.curves = head.curves.map((curve, i) => decodeCurve(bytes[`curve${i}`]));
    this.decoded = true;
  }

  decodeTables(bytes) {
    const all = (column) => {
      const reader = new Reader(column);
      const numbers = [];
      while (reader.more) numbers.push(reader.number());
      return numbers;
    };
    this.sizes = Float64Array.from(all(bytes.sizes));
    const sites = all(bytes.sites);
    this.siteStack = new Int32Array(sites.length / 3);
    this.siteCategory = new Uint8Array(sites.length / 3);
    this.siteStream = new Uint32Array(sites.length / 3);
    for (let i = 0; i < this.siteStack.length; i++) {
      this.siteStack[i] = sites[3 * i] - 1;
      this.siteCategory[i] = sites[3 * i + 1];
      this.siteStream[i] = sites[3 * i + 2];
    }
    // Node 0 is the root, outside of every stack.
    const nodes = all(bytes.nodes);
    this.nodeParent = new Uint32Array(nodes.length / 2 + 1);
    this.nodeFrame = new Int32Array(nodes.length / 2 + 1).fill(-1);
    for (let i = 0; i < nodes.length / 2; i++) {
      this.nodeParent[i + 1] = nodes[2 * i];
      this.nodeFrame[i + 1] = nodes[2 * i + 1];
    }
    const stacks = all(bytes.stacks);
    this.stackNode = Uint32Array.from(stacks.filter((_, i) => i % 2 === 0));
    this.stackLine = Uint32Array.from(stacks.filter((_, i) => i % 2 === 1));
    this.frames = JSON.parse(new TextDecoder().decode(bytes.frames));
    const start = all(bytes.start);
    this.initialRanges = [];
    let address = 0;
    for (let i = 0; i < start.length; i += 2) {
      address += start[i];
      this.initialRanges.push([address, address + start[i + 1]]);
    }
  }

  decodeEvents(bytes) {
    const { head } = this;
    const count = head.blocks;
    const ops = bytes.op;
    const size = new Reader(bytes.size);
    const site = new Reader(bytes.site);
    const age = new Reader(bytes.age);
    const range = new Reader(bytes.range);
    this.size = new Float64Array(count);
    this.site = new Uint32Array(count);
    this.from = new Uint32Array(count);
    this.until = new Uint32Array(count).fill(NEVER);
    this.done = new Uint32Array(count).fill(NEVER);
    const freed = new Uint32Array(count);
    this.changes = [];
    let state = 0, block = 0, frees = 0, last = 0, address = 0;
    for (let i = 0; i < ops.length; i++) {
      const op = ops[i];
      if (i >= head.initial && op < 0x80) state++;
      switch (op & 0x7f) {
        case 0:
          this.size[block] = this.sizes[size.number()];
          this.site[block] = site.number();
          this.from[block] = state;
          block++;
          break;
        case 1:
          last = block - 1 - age.number();
          this.until[last] = state;
          freed[frees++] = last;
          break;
        case 2:
          this.done[block - 1 - age.number()] = state;
          break;
        case 3:
          this.done[last] = state;
          break;
        case 5:
        case 6:
        case 8:
        case 9: {
          address = range.step(address);
          const length = range.number();
          const kind = op & 0x7f;
          const add = kind === 5 || kind === 8;
          this.changes.push({ state, add, isPart: kind >= 8, start: address, end: address + length });
          break;
        }
      }
    }
    this.freed = freed.subarray(0, frees);
    this.address = new Float64Array(count);
    if (bytes.address) {
      const reader = new Reader(bytes.address);
      let before = 0;
      for (let i = 0; i < count; i++) {
        const code = reader.number();
        if (code > 0) this.address[i] = before += unzigzag(code - 1);
      }
    }
  }

  decodeTimes(column) {
    const step = this.head.time_step;
    if (!step) return;
    const reader = new Reader(column);
    const times = [];
    let time = 0;
    while (reader.more) times.push((time = reader.step(time)));
    this.times = Float64Array.from(times);
  }

  get hasTimes() {
    return Boolean(this.times && this.times.length > 1 && this.times[this.times.length - 1] > this.times[0]);
  }

  // Seconds from the first event to the event that led to `state`. Interpolated between kept times.
  timeOf(state) {
    const at = Math.max(0, state - 1) / this.head.time_step;
    const low = Math.min(Math.floor(at), this.times.length - 1);
    const high = Math.min(low + 1, this.times.length - 1);
    const time = this.times[low] + (this.times[high] - this.times[low]) * (at - low);
    return (time - this.times[0]) / 1e6;
  }

  // The state that holds `seconds` after the first event.
  stateAt(seconds) {
    const time = this.times[0] + seconds * 1e6;
    const high = above(this.times, time);
    if (high === 0) return 0;
    const low = high - 1;
    const span = high < this.times.length ? this.times[high] - this.times[low] : 0;
    const part = span > 0 ? (time - this.times[low]) / span : 0;
    return Math.min(this.states - 1, Math.floor((low + part) * this.head.time_step) + 1);
  }

  // Splits the live bytes into groups: `groupOf[site]` is below `groups`. O(events).
  //
  // For each bucket of 64 states: least and most live bytes, the state of the most, the groups at
  // that state, and the groups before the bucket.
  group(groupOf, groups) {
    const buckets = Math.ceil(this.states / BUCKET);
    const levels = {
      groupOf,
      groups,
      min: new Float64Array(buckets),
      max: new Float64Array(buckets),
      at: new Uint32Array(buckets),
      atMost: new Float64Array(buckets * groups),
      before: new Float64Array(buckets * groups),
      nextBlock: new Uint32Array(buckets),
      nextFree: new Uint32Array(buckets),
    };
    const { from, until, freed, size, site } = this;
    const split = new Float64Array(groups);
    let live = 0, block = 0, free = 0;
    for (let bucket = 0; bucket < buckets; bucket++) {
      levels.before.set(split, bucket * groups);
      levels.nextBlock[bucket] = block;
      levels.nextFree[bucket] = free;
      let least = Infinity, most = -1;
      const end = Math.min(this.states, (bucket + 1) * BUCKET);
      for (let state = bucket * BUCKET; state < end; state++) {
        while (block < from.length && from[block] === state) {
          live += size[block];
          split[groupOf[site[block]]] += size[block];
          block++;
        }
        while (free < freed.length && until[freed[free]] === state) {
          const old = freed[free++];
          live -= size[old];
          split[groupOf[site[old]]] -= size[old];
        }
        if (live < least) least = live;
        if (live > most) {
          most = live;
          levels.at[bucket] = state;
          levels.atMost.set(split, bucket * groups);
        }
      }
      levels.min[bucket] = least;
      levels.max[bucket] = most;
    }
    return levels;
  }

  // The columns between `edges`, which are ascending states: least, most, its state and its groups.
  columns(levels, edges) {
    const count = edges.length - 1;
    const out = {
      min: new Float64Array(count),
      max: new Float64Array(count),
      at: new Uint32Array(count),
      groups: Array.from({ length: levels.groups }, () => new Float64Array(count)),
    };
    const states = edges[count] - edges[0];
    if (states <= 256 * BUCKET || states < count * 2 * BUCKET) this.exactColumns(levels, edges, out);
    else this.bucketColumns(levels, edges, out);
    return out;
  }

  bucketColumns(levels, edges, out) {
    const { groups } = levels;
    for (let column = 0; column < edges.length - 1; column++) {
      const first = Math.floor(edges[column] / BUCKET);
      const last = Math.max(first + 1, Math.floor(edges[column + 1] / BUCKET));
      let least = Infinity, most = -1, best = first;
      for (let bucket = first; bucket < last; bucket++) {
        if (levels.min[bucket] < least) least = levels.min[bucket];
        if (levels.max[bucket] > most) {
          most = levels.max[bucket];
          best = bucket;
        }
      }
      out.min[column] = least;
      out.max[column] = most;
      out.at[column] = levels.at[best];
      for (let group = 0; group < groups; group++) {
        out.groups[group][column] = levels.atMost[best * groups + group];
      }
    }
  }

  exactColumns(levels, edges, out) {
    const { from, until, freed, size, site } = this;
    const { groups, groupOf } = levels;
    const bucket = Math.floor(edges[0] / BUCKET);
    const split = levels.before.slice(bucket * groups, (bucket + 1) * groups);
    let live = split.reduce((sum, bytes) => sum + bytes, 0);
    let block = levels.nextBlock[bucket];
    let free = levels.nextFree[bucket];
    let state = bucket * BUCKET;
    const advance = () => {
      while (block < from.length && from[block] === state) {
        live += size[block];
        split[groupOf[site[block]]] += size[block];
        block++;
      }
      while (free < freed.length && until[freed[free]] === state) {
        const old = freed[free++];
        live -= size[old];
        split[groupOf[site[old]]] -= size[old];
      }
      state++;
    };
    while (state < edges[0]) advance();
    for (let column = 0; column < edges.length - 1; column++) {
      let least = Infinity, most = -1;
      while (state < edges[column + 1]) {
        const now = state;
        advance();
        if (live < least) least = live;
        if (live > most) {
          most = live;
          out.at[column] = now;
          for (let group = 0; group < groups; group++) out.groups[group][column] = split[group];
        }
      }
      out.min[column] = least;
      out.max[column] = most;
    }
  }

  // The most of a curve between `edges`.
  curveColumns(curve, edges) {
    const { states, bytes } = this.curves[curve];
    const out = new Float64Array(edges.length - 1);
    let next = above(states, edges[0]);
    let now = next > 0 ? bytes[next - 1] : 0;
    for (let column = 0; column < out.length; column++) {
      let most = now;
      while (next < states.length && states[next] < edges[column + 1]) {
        now = bytes[next];
        // A change at the first state of the column replaces the value from before.
        most = states[next] === edges[column] ? now : Math.max(most, now);
        next++;
      }
      out[column] = most;
    }
    return out;
  }

  // The numbers of the blocks that are live in `state`. O(blocks).
  liveBlocks(state) {
    const { from, until } = this;
    const end = above(from, state);
    const live = [];
    for (let block = 0; block < end; block++) if (until[block] > state) live.push(block);
    return live;
  }

  // Reserved ranges in `state`, in address order, each as start, end and whether it is a part of an
  // expandable segment.
  reservedRanges(state) {
    const ranges = new Map();
    for (const [start, end] of this.initialRanges) ranges.set(start, [start, end, false]);
    for (const { state: at, add, isPart, start, end } of this.changes) {
      if (at > state) break;
      if (add) ranges.set(start, [start, end, isPart]);
      else removeRange(ranges, start, end);
    }
    return [...ranges.values()].sort((a, b) => a[0] - b[0]);
  }
}

function removeRange(ranges, start, end) {
  if (ranges.get(start)?.[1] === end) {
    ranges.delete(start);
    return;
  }
  for (const [from, until, isPart] of [...ranges.values()]) {
    if (until <= start || from >= end) continue;
    ranges.delete(from);
    if (from < start) ranges.set(from, [from, start, isPart]);
    if (until > end) ranges.set(end, [end, until, isPart]);
  }
}

function decodeCurve(column) {
  const reader = new Reader(column || new Uint8Array(0));
  const states = [];
  const bytes = [];
  let state = 0, now = 0;
  while (reader.more) {
    states.push((state += reader.number()));
    bytes.push((now = reader.step(now)));
  }
  return { states: Uint32Array.from(states), bytes: Float64Array.from(bytes) };
}
