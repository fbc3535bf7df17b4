// The widget: switches, pictures, what is under the pointer, what is pinned, the table of source lines.

const LISTED = 12; // buffers of a pinned buffer's line that are listed

function make(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

function shortLine(source) { return source.replace(/^.*[/\\]/, ""); }
function lastPart(operation) { return operation.replace(/^.*\//, ""); }
function counted(count, noun) { return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`; }

class Timeline {
  constructor(root) {
    this.root = root;
    const data = JSON.parse(root.querySelector('script[type="application/json"]').textContent);
    this.kinds = data.kinds;
    this.programs = data.programs.map((program) => {
      const labels = program.labels.map((index) => data.texts[index]);
      const layouts = program.spaces.map((space) => layOut(space, data.texts, data.kinds, labels.length));
      return { ...program, labels, layouts, length: labels.length, phases: phasesOf(labels) };
    });
    this.spaces = [...new Set(this.programs.flatMap((program) => program.spaces.map((space, i) => this.spaceName(program, i))))];
    this.space = this.spaces[0];
    this.shown = new Set(this.programs.map((_, i) => i).slice(0, 2));
    this.due = null;
    this.pinned = this.hovered = this.line = null; // [panel, band], [panel, band], a source line
    this.dark = window.matchMedia("(prefers-color-scheme: dark)");
    this.printing = false;
    this.build(data);
    const again = () => { this.showLines(); this.draw(); };
    this.dark.addEventListener("change", again);
    window.addEventListener("beforeprint", () => { this.printing = true; again(); });
    window.addEventListener("afterprint", () => { this.printing = false; again(); });
    new ResizeObserver(() => this.draw()).observe(this.pictures);
    root.dataset.ready = "1";
  }

  // The first memory of every program has one name here: programs of one target may fill different memories.
  spaceName(program, i) { return i === 0 ? "at the peak" : program.spaces[i].name; }

  build(data) {
    const button = (text, label, run) => make("button", { type: "button", "aria-label": label, title: label, click: run }, text);
    this.toggles = this.programs.map((program, i) => make("button", { type: "button", click: () => this.toggle(i) }, program.name));
    this.picker = make("select", { "aria-label": "memory", change: () => { this.space = this.picker.value; this.refresh(); } },
      ...this.spaces.map((name) => make("option", { value: name }, name === "at the peak" ? this.programs[0].spaces[0].name : name)));
    this.pictures = make("div", { class: "pictures" });
    this.tip = make("div", { class: "tip", hidden: "" });
    this.said = make("div", { class: "said", "aria-live": "polite" });
    this.detail = make("section", { class: "detail", "aria-label": "pinned buffer" });
    this.lines = make("section", { class: "lines", "aria-label": "source lines" });
    this.root.append(
      make("div", { class: "tools" },
        this.programs.length > 1 ? make("span", { role: "group", "aria-label": "programs", class: "programs" }, ...this.toggles) : null,
        this.spaces.length > 1 ? make("label", {}, "memory: ", this.picker) : null,
        make("span", { role: "group", "aria-label": "zoom", class: "zoom" },
          button("−", "zoom out", () => this.zoom(1.5)), button("+", "zoom in", () => this.zoom(1 / 1.5)),
          button("whole", "show the whole schedule", () => this.reset())),
        make("span", { class: "soft phases" }, "steps of the ", ...["forward", "backward", "recomputation"].flatMap((phase) => [
          make("span", { class: `swatch ${phase}` }), `${phase === "recomputation" ? phase : `${phase} pass`} `]))),
      make("div", { class: "help" }, "Hover over a buffer to see what it is; click to pin it. Drag to move; ctrl + wheel zooms (with shift: steps alone, "
        + "with alt: bytes alone). Keys: arrows, enter, escape, + − 0, p for the peak. "
        + `Buffers below ${100 * data.share}% of the peak are one band for each kind; so are all but the largest ${data.most.toLocaleString("en")}.`),
      this.pictures, this.tip, this.said, make("div", { class: "below" }, this.lines, this.detail));
    this.refresh();
  }

  refresh() {
    this.hovered = this.pinned = null;
    this.toggles.forEach((toggle, i) => toggle.setAttribute("aria-pressed", this.shown.has(i)));
    this.panels = [...this.shown].sort((a, b) => a - b).flatMap((i) => {
      const program = this.programs[i], at = program.spaces.findIndex((_, j) => this.spaceName(program, j) === this.space);
      if (at < 0) return [];
      return [{ program, space: program.spaces[at], layout: program.layouts[at], length: program.length, phases: program.phases, cursor: null }];
    });
    this.colour();
    this.pictures.replaceChildren(...this.panels.map((panel) => this.figure(panel)));
    this.reset();
    this.showDetail();
    this.showLines();
  }

  toggle(i) {
    if (!this.shown.delete(i)) this.shown.add(i);
    if (!this.shown.size) this.shown.add((i + 1) % this.programs.length);
    this.refresh();
  }

  figure(panel) {
    const { program, space, layout } = panel, large = layout.bands.filter((band) => !band.changes).length;
    const small = layout.bands.filter((band) => band.changes).reduce((sum, band) => sum + band.count, 0);
    panel.canvas = make("canvas", {
      tabindex: "0", role: "img", "aria-label": `Live buffers of ${program.name} over ${program.length} steps, peak ${formatBytes(space.peak)}. `
        + "Arrow keys move through steps and buffers, enter pins a buffer.",
      pointermove: (event) => this.move(panel, event), pointerleave: () => this.leave(), pointerdown: (event) => this.down(panel, event),
      pointerup: (event) => this.up(panel, event), wheel: (event) => this.wheel(panel, event), keydown: (event) => this.key(panel, event),
      dblclick: () => this.reset(),
    });
    const drawn = `${counted(large, "buffer")} drawn` + (small ? `, ${small.toLocaleString("en")} small ones (at most ${formatBytes(space.below)}) as one band for each kind` : "");
    const compiled = space === program.spaces[0] && program.peak !== space.peak
      ? ` The compiler reports ${formatBytes(program.peak)}, with padding and holes.` : "";
    return make("figure", {
      "data-name": program.name, "data-bands": layout.bands.length, "data-peak": space.peak, "data-top": layout.most, "data-steps": program.length,
    }, make("figcaption", {}, make("b", {}, program.name), ` on ${program.target}: peak `, make("b", { class: "peak" }, formatBytes(space.peak)),
      make("span", { class: "soft" }, ` ${space.name}; ${drawn}.${compiled}`)), panel.canvas);
  }

  // ------------------------------------------------------------------------------------------------ colours and lines

  liveAtPeak(panel, band) {
    const extent = extentAt(band, panel.space.at);
    return extent ? extent[1] - extent[0] : 0;
  }

  // Gives a colour to each of the source lines whose temporaries take most at a peak.
  colour() {
    const most = new Map();
    this.panels.forEach((panel) => {
      const here = new Map();
      for (const band of panel.layout.bands) {
        if (!band.source || band.kind !== "temporary") continue;
        here.set(band.source, (here.get(band.source) || 0) + this.liveAtPeak(panel, band) + 1e-6 * band.bytes);
      }
      for (const [source, bytes] of here) most.set(source, Math.max(most.get(source) || 0, bytes));
    });
    const order = [...most].sort((a, b) => b[1] - a[1]).map(([source]) => source);
    this.colours = new Map(order.slice(0, LINES.length).map((source, i) => [source, LINES[i]]));
  }

  theme() { return this.printing || !this.dark.matches ? THEMES.light : THEMES.dark; }
  colourOf(band) {
    const theme = this.theme();
    if (band.kind !== "temporary") return theme[band.kind];
    if (band.changes || !band.source) return theme.temporary;
    return this.colours.get(band.source) || theme.other;
  }

  highlighted() { return this.pinned ? this.pinned[1].source : this.line; }

  showLines() {
    const rows = [], swatch = (colour) => make("span", { class: "swatch", style: `background:${colour}` });
    const row = (key, colour, text, test) => {
      const bytes = this.panels.map((panel) => panel.layout.bands.filter(test).reduce((sum, band) => sum + this.liveAtPeak(panel, band), 0));
      const cell = key === null ? make("span", { class: "name" }, swatch(colour), text) : make("button", {
        type: "button", class: "name", title: key, "aria-pressed": this.highlighted() === key,
        click: () => { this.pinned = null; this.line = this.line === key ? null : key; this.showDetail(); this.showLines(); this.draw(); },
      }, swatch(colour), text);
      if (bytes.some((each) => each > 0)) rows.push([Math.max(...bytes), make("tr", {}, make("td", {}, cell), ...bytes.map((each) => make("td", {}, formatBytes(each))))]);
    };
    const theme = this.theme(), ofKind = (kind) => (band) => band.kind === kind;
    for (const [source, colour] of this.colours) {
      const of = (band) => band.source === source && band.kind === "temporary";
      const parts = this.panels.flatMap((panel) => panel.layout.bands.filter(of)).sort((a, b) => b.bytes - a.bytes);
      row(source, colour, `${shortLine(source)}  ${lastPart(parts[0].operation || parts[0].name)}`, of);
    }
    row(null, theme.other, "other lines", (band) => band.kind === "temporary" && band.source && !band.changes && !this.colours.has(band.source));
    row(null, theme.temporary, "small, or without a line", (band) => band.kind === "temporary" && (band.changes || !band.source));
    for (const kind of this.kinds.slice(0, 3)) row(null, theme[kind], `${kind}s`, ofKind(kind));
    rows.sort((a, b) => b[0] - a[0]);
    this.lines.replaceChildren(make("table", {},
      make("thead", {}, make("tr", {}, make("th", {}, "live at the peak"), ...this.panels.map((panel) => make("th", {}, panel.program.name)))),
      make("tbody", {}, ...rows.map(([, each]) => each))));
  }

  // ------------------------------------------------------------------------------------------------------------- views

  whole() {
    const peak = Math.max(1, ...this.panels.map((panel) => panel.space.peak));
    return { x0: 0, x1: Math.max(1, ...this.panels.map((panel) => panel.length)), y0: 0, y1: peak * 1.06 };
  }

  reset() { this.view = this.whole(); this.draw(); }

  // Zooms by a factor around a point, (1/2, 1/2) in shares of the view unless told.
  zoom(factor, x = .5, y = .5, across = true, up = true) {
    const view = this.view, narrow = (low, high, share, least) => {
      const span = Math.max((high - low) * factor, least), at = low + (high - low) * share;
      return [at - span * share, at + span * (1 - share)];
    };
    if (across) [view.x0, view.x1] = narrow(view.x0, view.x1, x, 4);
    if (up) [view.y0, view.y1] = narrow(view.y0, view.y1, y, 16);
    this.keepInside();
  }

  keepInside() {
    const whole = this.whole(), view = this.view;
    for (const [low, high] of [["x0", "x1"], ["y0", "y1"]]) {
      const span = Math.min(view[high] - view[low], whole[high] - whole[low]);
      view[low] = Math.min(Math.max(view[low], whole[low]), whole[high] - span);
      view[high] = view[low] + span;
    }
    this.drawSoon();
  }

  // Draws before the next frame: several events in one frame are drawn once.
  drawSoon() {
    if (this.due) return;
    this.due = requestAnimationFrame(() => { this.due = null; this.draw(); });
  }

  draw() {
    if (!this.panels || !this.view) return;
    const theme = this.theme(), line = this.highlighted();
    for (const panel of this.panels) {
      const width = Math.max(panel.canvas.clientWidth, 240), height = Math.max(panel.canvas.clientHeight, 160);
      const ratio = Math.max(window.devicePixelRatio || 1, this.printing ? 3 : 1);
      panel.canvas.width = Math.round(width * ratio);
      panel.canvas.height = Math.round(height * ratio);
      panel.scale = scaleOf(width, height, this.view);
      const context = panel.canvas.getContext("2d");
      context.scale(ratio, ratio);
      drawPanel(context, width, height, {
        panel, view: this.view, theme, cursor: panel.cursor, colourOf: (band) => this.colourOf(band),
        bright: (band) => !line || band.source === line,
        marked: [this.pinned, this.hovered].filter((each) => each && each[0] === panel).map((each) => each[1]),
        others: this.panels.filter((other) => other !== panel).map((other) => [other.program.name, other.space.peak]),
      });
    }
  }

  // ----------------------------------------------------------------------------------------------- pointers and keys

  at(panel, event) {
    const box = panel.canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top, scale = panel.scale;
    const inside = x >= scale.left && x < scale.right && y <= scale.bottom && y >= scale.top - 6;
    return { x, y, inside, step: Math.floor(scale.step(x)), bytes: scale.bytes(y) };
  }

  // The band under the pointer, or else one that is a pixel beside it: a step may be narrower than a pixel.
  under(panel, at) {
    if (!at.inside) return null;
    const near = (pixels) => Math.max(0, Math.floor(panel.scale.step(at.x + pixels)));
    const band = bandAt(panel.layout.bands, at.step, at.bytes);
    if (band) return band;
    for (let step = near(-LEAST); step <= near(LEAST); step += 1) {
      const beside = bandAt(panel.layout.bands, step, at.bytes);
      if (beside) return beside;
    }
    return null;
  }

  move(panel, event) {
    const at = this.at(panel, event);
    if (this.drag) {
      const { view, x, y } = this.drag, scale = panel.scale;
      this.moved = this.moved || Math.abs(at.x - x) + Math.abs(at.y - y) > 4;
      if (this.moved) {
        const dx = (at.x - x) / (scale.right - scale.left) * (view.x1 - view.x0), dy = (at.y - y) / (scale.bottom - scale.top) * (view.y1 - view.y0);
        this.view = { x0: view.x0 - dx, x1: view.x1 - dx, y0: view.y0 + dy, y1: view.y1 + dy };
        this.keepInside();
      }
      return;
    }
    const band = this.under(panel, at);
    const changed = (this.hovered ? this.hovered[1] : null) !== band;
    this.hovered = band ? [panel, band] : null;
    panel.canvas.style.cursor = band ? "pointer" : "default";
    this.tip.hidden = !band;
    if (band) {
      this.tip.replaceChildren(...this.facts(panel, band, at.step));
      const box = this.root.getBoundingClientRect(), wide = this.tip.offsetWidth, x = event.clientX - box.left, y = event.clientY - box.top;
      this.tip.style.left = `${Math.max(0, Math.min(x + 14, box.width - wide - 4))}px`;
      this.tip.style.top = `${y + 16}px`;
    }
    if (changed) this.drawSoon();
  }

  leave() { if (this.drag) return; this.hovered = null; this.tip.hidden = true; this.drawSoon(); }

  down(panel, event) {
    const at = this.at(panel, event);
    this.drag = { view: { ...this.view }, x: at.x, y: at.y };
    this.moved = false;
    panel.canvas.focus({ preventScroll: true });
    try { panel.canvas.setPointerCapture(event.pointerId); } catch { /* an event that no pointer made */ }
  }

  up(panel, event) {
    const moved = this.moved;
    this.drag = null;
    if (moved) return;
    this.pin(panel, this.under(panel, this.at(panel, event)));
  }

  wheel(panel, event) {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const at = this.at(panel, event), scale = panel.scale;
    this.zoom(Math.exp(.0016 * (event.deltaY || event.deltaX)), (at.x - scale.left) / (scale.right - scale.left),
      (scale.bottom - at.y) / (scale.bottom - scale.top), !event.altKey, !event.shiftKey);
  }

  key(panel, event) {
    const stride = event.shiftKey ? 1 : Math.max(1, Math.round((this.view.x1 - this.view.x0) / 100));
    const cursor = panel.cursor === null ? panel.space.at : panel.cursor;
    const live = panel.layout.bands.filter((band) => { const extent = extentAt(band, cursor); return extent && extent[1] > extent[0]; });
    const here = this.hovered && this.hovered[0] === panel ? live.indexOf(this.hovered[1]) : -1;
    const go = (step, band) => {
      panel.cursor = Math.max(0, Math.min(panel.length - 1, step));
      const kept = band && extentAt(band, panel.cursor) ? band : bandAt(panel.layout.bands, panel.cursor, 0);
      this.hovered = kept ? [panel, kept] : null;
      if (panel.cursor < this.view.x0 || panel.cursor >= this.view.x1) {
        const half = (this.view.x1 - this.view.x0) / 2;
        this.view.x0 = panel.cursor - half; this.view.x1 = panel.cursor + half;
        this.keepInside();
      }
      this.said.textContent = kept ? this.sentence(panel, kept, panel.cursor) : "";
      this.draw();
    };
    const band = here >= 0 ? live[here] : null;
    const runs = {
      ArrowLeft: () => go(cursor - stride, band), ArrowRight: () => go(cursor + stride, band),
      ArrowUp: () => go(cursor, live[Math.min(live.length - 1, here + 1)]), ArrowDown: () => go(cursor, live[Math.max(0, here - 1)]),
      Home: () => go(0, band), End: () => go(panel.length - 1, band), p: () => go(panel.space.at, band),
      Enter: () => band && this.pin(panel, band), " ": () => band && this.pin(panel, band),
      Escape: () => { this.line = panel.cursor = null; this.hovered = null; this.said.textContent = ""; this.pin(panel, null); },
      "+": () => this.zoom(1 / 1.5), "=": () => this.zoom(1 / 1.5), "-": () => this.zoom(1.5), 0: () => this.reset(),
    };
    if (!panel.length || event.ctrlKey || event.metaKey || event.altKey || !Object.hasOwn(runs, event.key)) return;
    event.preventDefault();
    runs[event.key]();
  }

  // ----------------------------------------------------------------------------------------------- what a buffer is

  pin(panel, band) {
    this.pinned = !band || (this.pinned && this.pinned[1] === band) ? null : [panel, band];
    if (this.pinned) this.line = null;
    this.showDetail();
    this.showLines();
    this.draw();
  }

  lifetime(panel, band) {
    const steps = band.end - band.first, all = band.first === 0 && band.end === panel.length;
    return all ? "the whole program" : `steps ${band.first} to ${band.end - 1}, ${counted(steps, "step")} of ${panel.length.toLocaleString("en")}`;
  }

  sizeOf(panel, band, step) {
    const extent = extentAt(band, step), bytes = band.changes ? (extent ? extent[1] - extent[0] : 0) : band.bytes;
    return `${formatBytes(bytes)}${band.changes ? ` at step ${step}, at most ${formatBytes(band.bytes)}` : ""}`;
  }

  sentence(panel, band, step) {
    return [`step ${step}`, band.operation || band.name, band.shape, this.sizeOf(panel, band, step), band.source && shortLine(band.source), this.lifetime(panel, band)]
      .filter(Boolean).join(", ");
  }

  facts(panel, band, step) {
    const line = (text, style) => (text ? make("div", { class: style }, text) : null);
    return [
      line(band.operation || band.name, "operation"),
      line([band.shape, this.sizeOf(panel, band, step), band.kind].filter(Boolean).join(" · ")),
      line(shortLine(band.source), "source"), line(this.lifetime(panel, band), "soft"),
    ].filter(Boolean);
  }

  showDetail() {
    if (!this.pinned) {
      this.detail.replaceChildren(make("p", { class: "soft" }, "Nothing is pinned: click a band for its source line and all buffers from that line."));
      delete this.detail.dataset.source;
      return;
    }
    const [panel, band] = this.pinned, kin = band.source ? panel.layout.bands.filter((other) => other.source === band.source) : [];
    const live = kin.reduce((sum, other) => sum + this.liveAtPeak(panel, other), 0);
    const pair = (name, value) => (value ? [make("dt", {}, name), make("dd", {}, value)] : []);
    const bytes = `${this.sizeOf(panel, band, panel.space.at)} (${(100 * band.bytes / panel.space.peak).toFixed(1)}% of the peak; ${this.liveAtPeak(panel, band) ? "live" : "not live"} there)`;
    const others = [...kin].sort((a, b) => b.bytes - a.bytes || a.first - b.first).slice(0, LISTED).map((other) => make("tr", {},
      make("td", {}, make("button", { type: "button", "aria-pressed": other === band, click: () => { if (other !== band) this.pin(panel, other); } }, other.operation || other.name)),
      make("td", {}, other.shape), make("td", {}, formatBytes(other.bytes)), make("td", {}, `${other.first} to ${other.end - 1}`)));
    this.detail.dataset.source = band.source;
    this.detail.replaceChildren(
      make("h3", {}, `Pinned, of ${panel.program.name} `, make("button", { type: "button", click: () => this.pin(panel, null) }, "unpin")),
      make("dl", {}, ...pair("source line", shortLine(band.source)), ...pair("operation", band.operation), ...pair("array", band.shape), ...pair("bytes", bytes),
        ...pair("kind", band.kind), ...pair("live", this.lifetime(panel, band)), ...pair("instruction", band.name)),
      ...(kin.length ? [
        make("p", {}, `${counted(kin.length, "buffer")} drawn of this line, ${formatBytes(live)} at the peak`
          + (kin.length > LISTED ? `; the largest ${LISTED}:` : ":")),
        make("div", { class: "wide" }, make("table", {}, make("thead", {}, make("tr", {}, ...["operation", "array", "bytes", "steps"].map((each) => make("th", {}, each)))),
          make("tbody", {}, ...others))),
      ] : []));
  }
}

for (const root of document.querySelectorAll(".jaxckpt-timeline:not([data-ready])")) new Timeline(root);
