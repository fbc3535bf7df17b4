// Places buffers: each is a band whose height is its bytes, and at every step the live bands stand on one another.
// A buffer that lives long lies low, so that those above it move seldom.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

function formatBytes(count) {
  let size = count, unit = 0;
  while (Math.abs(size) >= 1024 && unit < UNITS.length - 1) { size /= 1024; unit += 1; }
  return unit === 0 ? `${Math.round(size)} B` : `${size.toFixed(1)} ${UNITS[unit]}`;
}

// The band of one buffer. `xs[i]` to `xs[i + 1]` (the last: to `end`), it reaches from `low[i]` to `high[i]` bytes.
function bandOf(row, texts, kinds) {
  const [first, last, bytes, kind, name, shape, operation, source] = row;
  return {
    first, end: last + 1, bytes, kind: kinds[kind], name: texts[name], shape: texts[shape], operation: texts[operation],
    source: texts[source], count: 1, xs: [], low: [], high: [],
  };
}

// The band of all small buffers of a kind: its height changes.
function bandOfSmall(small, kinds, length) {
  const kind = kinds[small.kind];
  return {
    first: 0, end: length, bytes: small.changes.reduce((most, change) => Math.max(most, change[1]), 0), kind, name: "",
    shape: "", operation: `${small.count} small ${kind}s`, source: "", count: small.count, changes: small.changes,
    xs: [], low: [], high: [],
  };
}

// Lower bands come first: what stands throughout, then temporaries, the longest-lived first, then the small ones.
function orderOf(kinds) {
  return (a, b) => {
    const level = (band) => (band.kind === "temporary" ? (band.changes ? kinds.length + 1 : kinds.length) : kinds.indexOf(band.kind));
    return level(a) - level(b) || (b.end - b.first) - (a.end - a.first) || b.bytes - a.bytes || a.first - b.first;
  };
}

// Returns the bands of one memory, with their places, and the height of the whole stack: `top`, from `topAt` on.
function layOut(space, texts, kinds, length) {
  const bands = [
    ...space.bands.map((row) => bandOf(row, texts, kinds)),
    ...space.small.map((small) => bandOfSmall(small, kinds, length)),
  ].sort(orderOf(kinds));
  const events = new Map(); // position -> what begins, ends and changes there
  const at = (position) => {
    if (!events.has(position)) events.set(position, { begin: [], end: [], change: [] });
    return events.get(position);
  };
  bands.forEach((band, rank) => {
    band.rank = rank;
    if (band.changes) {
      at(0).begin.push(band);
      band.height = 0;
      for (const [position, bytes] of band.changes) at(position).change.push([band, bytes]);
    } else {
      at(band.first).begin.push(band);
      if (band.end < length) at(band.end).end.push(band);
      band.height = band.bytes;
    }
  });
  const live = [], topAt = [], top = [];
  const placeOf = (band) => {
    let from = 0, to = live.length;
    while (from < to) { const half = (from + to) >> 1; if (live[half].rank < band.rank) from = half + 1; else to = half; }
    return from;
  };
  for (const position of [...events.keys()].sort((a, b) => a - b)) {
    const { begin, end, change } = events.get(position);
    let lowest = live.length;
    for (const band of end) { const place = placeOf(band); live.splice(place, 1); lowest = Math.min(lowest, place); }
    for (const band of begin) { const place = placeOf(band); live.splice(place, 0, band); lowest = Math.min(lowest, place); }
    for (const [band, bytes] of change) { band.height = bytes; lowest = Math.min(lowest, placeOf(band)); }
    let sum = lowest > 0 ? live[lowest - 1].high[live[lowest - 1].high.length - 1] : 0;
    for (let i = lowest; i < live.length; i += 1) {
      const band = live[i], before = band.xs.length - 1, low = sum;
      sum += band.height;
      if (before >= 0 && band.low[before] === low && band.high[before] === sum) continue;
      if (before >= 0 && band.xs[before] === position) { band.low[before] = low; band.high[before] = sum; continue; }
      band.xs.push(position); band.low.push(low); band.high.push(sum);
    }
    const whole = live.length ? live[live.length - 1].high[live[live.length - 1].high.length - 1] : 0;
    topAt.push(position); top.push(whole);
  }
  return { bands, topAt, top, most: top.reduce((most, height) => Math.max(most, height), 0) };
}

// The last index into increasing numbers that is at most a value; -1 if there is none.
function lastAtMost(numbers, value) {
  let from = 0, to = numbers.length;
  while (from < to) { const half = (from + to) >> 1; if (numbers[half] <= value) from = half + 1; else to = half; }
  return from - 1;
}

// Returns the extent of a band in bytes at a position, [low, high]; null where it is not live.
function extentAt(band, position) {
  if (position < band.first || position >= band.end) return null;
  const i = lastAtMost(band.xs, position);
  return i < 0 ? null : [band.low[i], band.high[i]];
}

// Returns the band at a position and a height; null if there is none.
function bandAt(bands, position, height) {
  for (const band of bands) {
    const extent = extentAt(band, position);
    if (extent && extent[0] <= height && height < extent[1]) return band;
  }
  return null;
}

// Returns stretches of steps: [from, to, "forward" | "backward" | "recomputation"]. A step without a name goes with those
// before it.
function phasesOf(labels) {
  const phases = [];
  labels.forEach((label, position) => {
    const last = phases[phases.length - 1];
    let phase = last ? last[2] : "forward";
    if (/rematted_computation/.test(label)) phase = "recomputation";
    else if (/transpose\(/.test(label)) phase = "backward";
    else if (/jvp\(/.test(label)) phase = "forward";
    if (last && last[2] === phase) last[1] = position + 1;
    else phases.push([position, position + 1, phase]);
  });
  return phases;
}
