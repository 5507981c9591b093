"""The script and style of the HTML picture: plain browser code, nothing to load.

NOTE: it stands in a module, not in a file of its own, so that every installation has it.
"""

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #222; --soft: #555; --line: 46%; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #1c1c1e; --ink: #ddd; --soft: #aaa; --line: 64%; --idle: #3a3936; }
}
body { font: 13px sans-serif; margin: 0 16px 16px; color: var(--ink); background: var(--paper); }
header { position: sticky; top: 0; padding: 10px 0 6px; background: var(--paper);
  display: flex; flex-wrap: wrap; gap: 4px 14px; align-items: center; }
h2 { font-size: 15px; margin: 14px 0 2px; } p { margin: 2px 0 6px; color: var(--soft); }
canvas { width: 100%; display: block; cursor: crosshair; touch-action: pan-y; }
i { display: inline-block; width: 12px; height: 12px; margin-right: 4px; vertical-align: -1px; }
#tip { position: fixed; display: none; background: #222; color: #fff; padding: 4px 8px; z-index: 1;
  border: 1px solid #888; border-radius: 4px; pointer-events: none; white-space: pre; font-size: 12px; }
"""

BUTTONS = (
    '<span><button id="in" title="zoom in: + or the wheel">+</button>\n'
    '<button id="out" title="zoom out: - or the wheel">&minus;</button>\n'
    '<button id="all" title="show all: 0 or a double click; move: drag or arrow keys">all</button></span>'
)

SCRIPT = """
const LEFT = 64, RIGHT = 16, ROW = 24, LANE = 7, GAP = 5, AXIS = 22, CURVE = 90, CAPTION = 18;
const end = Math.max(...DATA.panels.map(p => p.end)) || 1;
// The span of time in view; what the pointer is at: a panel, ranks of it, a time.
let view = [0, end], pointed = null, asked = 0;
const tip = document.getElementById("tip");
const show = x => String(Number(x.toPrecision(6)));
const timed = x => show(x) + (DATA.unit && " " + DATA.unit);
const limit = (x, low, high) => Math.max(low, Math.min(x, high));
// Ranks in order, from violet to orange.
const line = (p, rank, css) =>
  `hsl(${265 - 240 * rank / Math.max(p.ranks - 1, 1)} 75% ${css.getPropertyValue("--line")})`;

const pitch = p => ROW + GAP + (p.messages.length ? LANE : 0);
const rowsOf = p => p.ranks * pitch(p);
const height = p => rowsOf(p) + AXIS + CAPTION + CURVE + 4;
const scale = width => (width - LEFT - RIGHT) / (view[1] - view[0]);
const xOf = (time, width) => LEFT + (time - view[0]) * scale(width);
const timeOf = (x, width) => view[0] + (x - LEFT) / scale(width);

// What is held at a time: the last entry not after it.
function held([times, amounts], time) {
  let low = 0, high = times.length;
  while (low < high) { const mid = (low + high) >> 1; times[mid] <= time ? low = mid + 1 : high = mid; }
  return low ? amounts[low - 1] : 0;
}
function level(p, amount) { return rowsOf(p) + AXIS + CAPTION + CURVE * (1 - amount / p.top); }

function axis(c, y, width) {
  const span = view[1] - view[0], power = Math.pow(10, Math.floor(Math.log10(span)));
  const most = limit((width - LEFT - RIGHT) / 70, 2, 12);
  const step = [0.1, 0.2, 0.5, 1, 2, 5].map(s => s * power).find(s => span / s <= most) || 10 * power;
  const digits = Math.max(0, Math.ceil(-Math.log10(step)));
  c.fillText(DATA.unit || "time", 10, y + 15);
  c.textAlign = "center";
  for (let n = Math.ceil(view[0] / step - 1e-9); n * step <= view[1] + step * 1e-9; n++) {
    const text = String(Number((n * step).toFixed(digits))), half = c.measureText(text).width / 2;
    const x = xOf(n * step, width);
    c.fillRect(x, y, 1, 4); c.fillText(text, Math.min(x, width - half - 1), y + 15);
  }
  c.textAlign = "left";
}
function boxes(c, p, list, y0, high, width, paper) {
  for (const [rank, start, stop, label, , color] of list) {
    if (stop <= view[0] || start >= view[1]) continue;
    const x = xOf(Math.max(start, view[0]), width), w = Math.max(xOf(Math.min(stop, view[1]), width) - x, 1);
    const y = y0 + rank * pitch(p);
    c.fillStyle = DATA.colors[color]; c.fillRect(x, y, w, high);
    if (w > 3 && stop <= view[1]) { c.fillStyle = paper; c.fillRect(x + w - 0.7, y, 0.7, high); }
    const size = high < ROW ? 0 : [11, 8].find(s => label.length * s * 0.6 + 1 <= w);
    if (!size) continue;
    c.font = size + "px sans-serif"; c.fillStyle = DATA.inks[color]; c.textAlign = "center";
    c.fillText(label, x + w / 2, y + 16);
  }
  c.font = "11px sans-serif"; c.textAlign = "left";
}
function curves(c, p, width, css) {
  const y = rowsOf(p) + AXIS;
  c.fillStyle = css.getPropertyValue("--soft");
  c.fillText("memory" + (p.memoryUnit && ", " + p.memoryUnit), LEFT, y + 11);
  c.fillText(show(p.top), 10, level(p, p.top) + 4); c.fillText("0", 10, level(p, 0) + 4);
  c.fillStyle = css.getPropertyValue("--idle");
  for (const amount of [0, p.top]) c.fillRect(LEFT, level(p, amount), width - LEFT - RIGHT, 1);
  c.save(); c.beginPath(); c.rect(LEFT - 1, y, width - LEFT - RIGHT + 2, CAPTION + CURVE + 4); c.clip();
  const chosen = rank => pointed && pointed.panel === p && pointed.ranks.includes(rank);
  const others = p.memory.some((m, rank) => chosen(rank)) ? 0.4 : 1;
  p.memory.forEach(([times, amounts], rank) => {
    c.strokeStyle = line(p, rank, css); c.beginPath();
    c.lineWidth = chosen(rank) ? 3 : 1.2; c.globalAlpha = chosen(rank) ? 1 : others;
    times.forEach((time, i) => {
      const until = i + 1 < times.length ? times[i + 1] : p.end;
      c.lineTo(xOf(time, width), level(p, amounts[i])); c.lineTo(xOf(until, width), level(p, amounts[i]));
    });
    c.stroke();
  });
  c.restore();
}
function paint(p) {
  const width = p.canvas.clientWidth || 1200, dense = window.devicePixelRatio || 1;
  p.canvas.width = width * dense; p.canvas.height = height(p) * dense;
  p.canvas.style.height = height(p) + "px";
  const c = p.canvas.getContext("2d"), css = getComputedStyle(document.body);
  c.scale(dense, dense); c.font = "11px sans-serif";
  c.fillStyle = css.getPropertyValue("--idle");
  const stop = xOf(Math.min(p.end, view[1]), width);
  for (let rank = 0; rank < p.ranks && stop > LEFT; rank++) {
    c.fillRect(LEFT, rank * pitch(p), stop - LEFT, ROW);
  }
  boxes(c, p, p.tasks, 0, ROW, width, css.backgroundColor);
  c.globalAlpha = 0.7; boxes(c, p, p.messages, ROW, LANE, width, css.backgroundColor); c.globalAlpha = 1;
  for (let rank = 0; rank < p.ranks; rank++) {
    const y = rank * pitch(p);
    c.fillStyle = line(p, rank, css); c.fillRect(2, y + 6, 3, 12);
    c.fillStyle = css.color; c.fillText("rank " + rank, 10, y + 16);
  }
  axis(c, rowsOf(p), width);
  curves(c, p, width, css);
  if (pointed && pointed.time >= view[0] && pointed.time <= view[1]) {
    c.fillStyle = css.color; c.globalAlpha = 0.5;
    c.fillRect(xOf(pointed.time, width), 0, 1, height(p)); c.globalAlpha = 1;
  }
}
function repaint() {
  asked = asked || requestAnimationFrame(() => { asked = 0; DATA.panels.forEach(paint); });
}
function look(start, span) {
  span = limit(span, end * 1e-5, end);
  start = limit(start, 0, end - span);
  view = [start, start + span];
  tell("", 0, 0);
  repaint();
}
function zoom(factor, at) {
  const span = limit((view[1] - view[0]) * factor, end * 1e-5, end);
  look(at - (at - view[0]) / (view[1] - view[0]) * span, span);
}
const move = share => look(view[0] + share * (view[1] - view[0]), view[1] - view[0]);
const middle = () => (view[0] + view[1]) / 2;
const actions = {
  in: () => zoom(0.5, middle()), out: () => zoom(2, middle()), all: () => look(0, end),
  left: () => move(-0.2), right: () => move(0.2),
};
const keys = { "+": "in", "=": "in", "-": "out", 0: "all", ArrowLeft: "left", ArrowRight: "right" };

// The text for a place on a panel: a task, messages, or what is held; with the ranks it is about.
function describe(p, x, y, width) {
  const time = timeOf(x, width), rank = Math.floor(y / pitch(p)), inside = y - rank * pitch(p);
  if (x < LEFT || x > width - RIGHT || time > p.end) return ["", []];
  if (rank < p.ranks) {
    const list = inside < ROW ? p.tasks : inside < ROW + LANE ? p.messages : [];
    const found = list.filter(b => b[0] === rank && b[1] <= time && time < b[2]);
    const texts = found.map(b => `rank ${rank}: ${b[4]}\\n` +
      `${timed(b[1])} to ${timed(b[2])}, takes ${timed(b[2] - b[1])}`);
    return [texts.join("\\n") || (inside < ROW ? `rank ${rank} idles at ${timed(time)}` : ""), [rank]];
  }
  if (y < rowsOf(p) + AXIS) return ["", []];
  const amounts = p.memory.map(m => held(m, time)), far = a => Math.abs(level(p, a) - y);
  const amount = amounts.reduce((best, a) => far(a) < far(best) ? a : best);
  const ranks = amounts.flatMap((a, r) => a === amount ? [r] : []);
  return [`memory ${show(amount)} at ${timed(time)}\\nof rank ${ranks.join(", ")}`, ranks];
}
function tell(text, x, y) {
  tip.style.display = text ? "block" : "none"; tip.textContent = text;
  tip.style.left = limit(x + 14, 0, innerWidth - tip.offsetWidth - 4) + "px";
  tip.style.top = (y + 14 + tip.offsetHeight < innerHeight ? y + 14 : y - 10 - tip.offsetHeight) + "px";
}
DATA.panels.forEach((p, index) => {
  const canvas = p.canvas = document.getElementById("panel" + index);
  p.top = p.memory.reduce((top, m) => m[1].reduce((a, b) => Math.max(a, b), top), 0) || 1;
  let drag = null;
  canvas.addEventListener("wheel", e => {
    // Over the names of ranks it scrolls the page.
    if (e.offsetX < LEFT) return;
    e.preventDefault();
    const sideways = e.shiftKey || Math.abs(e.deltaX) > Math.abs(e.deltaY);
    if (sideways) move((e.deltaX || e.deltaY) / canvas.clientWidth);
    else zoom(Math.exp(limit(e.deltaY, -200, 200) / 400), timeOf(e.offsetX, canvas.clientWidth));
  }, { passive: false });
  canvas.addEventListener("pointerdown", e => { drag = e.clientX; canvas.setPointerCapture(e.pointerId); });
  for (const stop of ["pointerup", "pointercancel"]) canvas.addEventListener(stop, () => { drag = null; });
  canvas.addEventListener("pointerleave", () => { tell("", 0, 0); pointed = null; repaint(); });
  canvas.addEventListener("dblclick", actions.all);
  canvas.addEventListener("pointermove", e => {
    const width = canvas.clientWidth;
    if (drag !== null) { move((drag - e.clientX) / (width - LEFT - RIGHT)); drag = e.clientX; }
    const [text, ranks] = describe(p, e.offsetX, e.offsetY, width);
    pointed = { panel: p, ranks, time: timeOf(e.offsetX, width) };
    tell(text, e.clientX, e.clientY);
    repaint();
  });
});
for (const name of ["in", "out", "all"]) document.getElementById(name).onclick = actions[name];
addEventListener("keydown", e => {
  if (!(e.key in keys) || e.ctrlKey || e.metaKey || e.altKey) return;
  e.preventDefault(); actions[keys[e.key]]();
});
addEventListener("resize", repaint);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
repaint();
"""
