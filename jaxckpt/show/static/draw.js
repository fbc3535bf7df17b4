// Draws the bands of one program to a canvas.

const LINES = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7a5ba6", "#8c6d31", "#c0392b", "#2f8f9d"];
const THEMES = {
  light: {
    ground: "#ffffff", ink: "#1f2933", soft: "#616e7c", rule: "#dde2e7", edge: "rgba(255,255,255,.75)", mark: "#111827",
    argument: "#b8c2cc", output: "#9fb0a4", constant: "#d3c9b4", temporary: "#e3d3c4", other: "#a9b8c9", veil: .16,
    forward: "#8fbf9f", backward: "#8fa8d0", recomputation: "#e0a36a",
  },
  dark: {
    ground: "#14191f", ink: "#e4e7eb", soft: "#9aa5b1", rule: "#2b353f", edge: "rgba(20,25,31,.7)", mark: "#ffffff",
    argument: "#4d5a67", output: "#4f6357", constant: "#6b6350", temporary: "#66574a", other: "#5d6f83", veil: .18,
    forward: "#3f7a55", backward: "#44639b", recomputation: "#a3652b",
  },
};
const LEAST = 1.5; // pixels, of the narrowest band
const MARGIN = { left: 74, right: 14, top: 26, bottom: 46 };

// Returns a "nice" distance between ticks: 1, 2 or 5 times a power of ten; of bytes, times a power of 1024.
function tickStep(span, count, binary) {
  let unit = 1;
  if (binary) while (unit * 1024 < span) unit *= 1024;
  const rough = span / count / unit, power = 10 ** Math.floor(Math.log10(rough));
  const nice = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power * unit;
  return Math.max(nice, 1);
}

// Maps steps and bytes to pixels and back, for a canvas of some size and a view {x0, x1, y0, y1}.
function scaleOf(width, height, view) {
  const across = width - MARGIN.left - MARGIN.right, up = height - MARGIN.top - MARGIN.bottom;
  return {
    x: (step) => MARGIN.left + (step - view.x0) / (view.x1 - view.x0) * across,
    y: (bytes) => MARGIN.top + up - (bytes - view.y0) / (view.y1 - view.y0) * up,
    step: (x) => view.x0 + (x - MARGIN.left) / across * (view.x1 - view.x0),
    bytes: (y) => view.y0 + (MARGIN.top + up - y) / up * (view.y1 - view.y0),
    left: MARGIN.left, right: MARGIN.left + across, top: MARGIN.top, bottom: MARGIN.top + up,
  };
}

// Makes the outline of a band the path that is filled next. Returns its width in pixels, 0 if it is out of sight.
function outline(context, band, scale, view) {
  const from = Math.max(0, lastAtMost(band.xs, view.x0)), edges = [];
  for (let i = from; i < band.xs.length && band.xs[i] < view.x1; i += 1) {
    const end = i + 1 < band.xs.length ? band.xs[i + 1] : band.end;
    edges.push([scale.x(Math.max(band.xs[i], view.x0)), scale.x(Math.min(end, view.x1)), scale.y(band.low[i]), scale.y(band.high[i])]);
  }
  if (!edges.length) return 0;
  const wide = edges[edges.length - 1][1] - edges[0][0];
  if (wide < LEAST) edges[edges.length - 1][1] += LEAST - wide; // a band of one step among thousands is seen, too
  context.beginPath();
  for (const [x0, x1, , high] of edges) { context.lineTo(x0, high); context.lineTo(x1, high); }
  for (const [x0, x1, low] of edges.reverse()) { context.lineTo(x1, low); context.lineTo(x0, low); }
  context.closePath();
  return wide;
}

// Draws one program. `state` has: panel, view, theme, colourOf, bright (whether a band is not dimmed), marked (bands with
// a thick outline), cursor (a step or null), others (other programs' peaks: [name, bytes]).
function drawPanel(context, width, height, state) {
  const { panel, view, theme } = state, scale = scaleOf(width, height, view);
  context.fillStyle = theme.ground;
  context.fillRect(0, 0, width, height);
  context.font = "12px system-ui, sans-serif";
  drawAxes(context, scale, view, theme, panel);
  context.save();
  context.beginPath();
  context.rect(scale.left, scale.top - 6, scale.right - scale.left, scale.bottom - scale.top + 6);
  context.clip();
  for (const band of panel.layout.bands) {
    if (band.end <= view.x0 || band.first >= view.x1) continue;
    const wide = outline(context, band, scale, view);
    if (!wide) continue;
    context.globalAlpha = state.bright(band) ? 1 : theme.veil;
    context.fillStyle = state.colourOf(band);
    context.fill();
    if (wide > 3 && scale.y(0) - scale.y(band.bytes) > 2.5) { context.strokeStyle = theme.edge; context.lineWidth = .8; context.stroke(); }
  }
  context.globalAlpha = 1;
  for (const band of state.marked) {
    if (!outline(context, band, scale, view)) continue;
    context.strokeStyle = theme.mark; context.lineWidth = 2; context.stroke();
  }
  drawPeaks(context, scale, state);
  if (state.cursor !== null) {
    context.strokeStyle = theme.mark; context.lineWidth = 1; context.setLineDash([2, 3]);
    context.beginPath(); context.moveTo(scale.x(state.cursor + .5), scale.top); context.lineTo(scale.x(state.cursor + .5), scale.bottom);
    context.stroke(); context.setLineDash([]);
  }
  context.restore();
  drawPhases(context, scale, view, theme, panel);
}

function drawAxes(context, scale, view, theme, panel) {
  context.textBaseline = "middle";
  context.textAlign = "right";
  context.lineWidth = 1;
  const rise = tickStep(view.y1 - view.y0, Math.max(2, (scale.bottom - scale.top) / 55), true);
  for (let tick = Math.ceil(view.y0 / rise) * rise; tick <= view.y1; tick += rise) {
    const y = Math.round(scale.y(tick)) + .5;
    context.strokeStyle = theme.rule;
    context.beginPath(); context.moveTo(scale.left, y); context.lineTo(scale.right, y); context.stroke();
    context.fillStyle = theme.soft;
    context.fillText(formatBytes(tick), scale.left - 8, y);
  }
  context.textAlign = "center";
  const run = tickStep(view.x1 - view.x0, Math.max(2, (scale.right - scale.left) / 90), false);
  for (let tick = Math.ceil(view.x0 / run) * run; tick <= view.x1; tick += run) {
    const x = Math.round(scale.x(tick)) + .5;
    context.strokeStyle = theme.rule;
    context.beginPath(); context.moveTo(x, scale.bottom); context.lineTo(x, scale.bottom + 4); context.stroke();
    context.fillStyle = theme.soft;
    if (x < scale.right - 60) context.fillText(String(tick), x, scale.bottom + 26);
  }
  context.textAlign = "right";
  context.fillText(panel.length > 0 ? "step" : "no steps", scale.right, scale.bottom + 26);
}

// A strip below the picture says which steps are the forward pass, the backward pass, or run again.
function drawPhases(context, scale, view, theme, panel) {
  for (const [from, to, phase] of panel.phases) {
    const x0 = scale.x(Math.max(from, view.x0)), x1 = scale.x(Math.min(to, view.x1));
    if (x1 <= x0) continue;
    context.fillStyle = theme[phase];
    context.fillRect(x0, scale.bottom + 5, Math.max(x1 - x0, .5), 8);
  }
}

function drawPeaks(context, scale, state) {
  const { panel, theme } = state, line = (bytes, text, colour, dash) => {
    const y = scale.y(bytes);
    if (y < scale.top - 6 || y > scale.bottom) return;
    context.strokeStyle = colour; context.lineWidth = 1.2; context.setLineDash(dash);
    context.beginPath(); context.moveTo(scale.left, y); context.lineTo(scale.right, y); context.stroke();
    context.setLineDash([]);
    context.fillStyle = colour; context.textAlign = "right"; context.textBaseline = "bottom";
    context.lineWidth = 4; context.strokeStyle = theme.ground; context.lineJoin = "round";
    context.strokeText(text, scale.right - 6, y - 3);
    context.fillText(text, scale.right - 6, y - 3);
  };
  for (const [name, bytes] of state.others) {
    if (Math.abs(scale.y(bytes) - scale.y(panel.space.peak)) > 16) line(bytes, `${name}: ${formatBytes(bytes)}`, theme.soft, [3, 4]);
  }
  line(panel.space.peak, `peak ${formatBytes(panel.space.peak)}`, theme.ink, [6, 3]);
  if (panel.length > 0) {
    context.beginPath();
    context.arc(scale.x(panel.space.at + .5), scale.y(panel.space.peak), 3.5, 0, 7);
    context.fillStyle = theme.ink; context.fill();
  }
}
