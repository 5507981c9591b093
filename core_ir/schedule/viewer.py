"""The script and style of the HTML picture: plain browser code, nothing to load.

NOTE: it stands in a module, not in a file of its own, so that every installation has it.
"""

STYLE = """
body { font: 13px sans-serif; margin: 16px; color: #222; }
h2 { font-size: 15px; margin: 18px 0 2px; } p { margin: 2px 0 6px; color: #555; }
canvas { width: 100%; display: block; cursor: crosshair; }
#tip { position: fixed; display: none; background: #222; color: #fff; padding: 4px 8px;
  border-radius: 4px; pointer-events: none; white-space: pre; font-size: 12px; }
.key { display: inline-block; width: 12px; height: 12px; margin: 0 4px 0 14px; vertical-align: -1px; }
button { margin-right: 4px; }
"""

SCRIPT = """
const LEFT = 64, ROW = 24, LANE = 7, GAP = 4, AXIS = 22, CURVE = 90, RIGHT = 12;
const LINES = ["#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5"];
const end = Math.max(...DATA.panels.map(p => p.end)) || 1;
let view = [0, end];
const tip = document.getElementById("tip");
const show = x => Number(x.toPrecision(6)).toString();

function height(p) {
  return p.ranks * (ROW + LANE + GAP) + AXIS + (p.memory.length ? CURVE + AXIS : 0);
}
function scale(width) { return (width - LEFT - RIGHT) / (view[1] - view[0]); }
function step() {
  const span = view[1] - view[0], power = Math.pow(10, Math.floor(Math.log10(span)));
  return [0.1, 0.2, 0.5, 1].map(s => s * power).find(s => span / s <= 12);
}
// What is held at a time: the last entry not after it.
function held(curve, time) {
  const [times, amounts] = curve;
  let low = 0, high = times.length;
  while (low < high) { const mid = (low + high) >> 1; times[mid] <= time ? low = mid + 1 : high = mid; }
  return low ? amounts[low - 1] : 0;
}
function axis(c, y, width) {
  const s = step(), k = scale(width);
  c.fillStyle = "#222"; c.textAlign = "center";
  for (let t = Math.ceil(view[0] / s) * s; t <= view[1] + s / 1e6; t += s) {
    const x = LEFT + (t - view[0]) * k;
    c.fillRect(x, y, 1, 4); c.fillText(show(t), x, y + 15);
  }
}
function boxes(c, list, y0, high, width, labels) {
  const k = scale(width);
  for (const [rank, start, stop, label, , color] of list) {
    if (stop < view[0] || start > view[1]) continue;
    const x = LEFT + (start - view[0]) * k, w = Math.max((stop - start) * k, 1);
    const y = y0 + rank * (ROW + LANE + GAP);
    c.fillStyle = DATA.colors[color]; c.fillRect(x, y, w, high);
    if (w > 3) { c.fillStyle = "#fff"; c.fillRect(x + w - 0.7, y, 0.7, high); }
    if (labels && w > label.length * 7 + 2) {
      c.fillStyle = "#111"; c.textAlign = "center"; c.fillText(label, x + w / 2, y + 16);
    }
  }
}
function curves(c, p, y, width) {
  const top = Math.max(...p.memory.map(m => Math.max(...m[1]))) || 1, k = scale(width);
  c.fillStyle = "#555"; c.textAlign = "left";
  c.fillText("memory", 8, y + 12); c.fillText(show(top), 8, y + 26);
  p.memory.forEach(([times, amounts], rank) => {
    c.strokeStyle = LINES[rank % LINES.length]; c.beginPath();
    times.forEach((time, i) => {
      const until = i + 1 < times.length ? times[i + 1] : p.end;
      const level = y + CURVE - amounts[i] / top * (CURVE - 6);
      c.lineTo(LEFT + (time - view[0]) * k, level); c.lineTo(LEFT + (until - view[0]) * k, level);
    });
    c.stroke();
  });
}
function paint(p) {
  const canvas = p.canvas, width = canvas.clientWidth || 1200, dense = window.devicePixelRatio || 1;
  canvas.width = width * dense; canvas.height = height(p) * dense;
  canvas.style.height = height(p) + "px";
  const c = canvas.getContext("2d");
  c.scale(dense, dense); c.font = "11px sans-serif";
  c.save(); c.beginPath(); c.rect(LEFT, 0, width - LEFT - RIGHT + 1, height(p)); c.clip();
  const k = scale(width);
  c.fillStyle = DATA.idle;
  for (let rank = 0; rank < p.ranks; rank++)
    c.fillRect(LEFT - view[0] * k, rank * (ROW + LANE + GAP), p.end * k, ROW);
  boxes(c, p.tasks, 0, ROW, width, true);
  boxes(c, p.messages, ROW, LANE, width, false);
  const y = p.ranks * (ROW + LANE + GAP);
  axis(c, y, width);
  if (p.memory.length) axis(c, y + AXIS + CURVE, width);
  c.restore();
  if (p.memory.length) {
    c.save(); c.beginPath(); c.rect(0, 0, width - RIGHT + 1, height(p)); c.clip();
    curves(c, p, y + AXIS, width); c.restore();
  }
  c.fillStyle = "#222"; c.textAlign = "left";
  for (let rank = 0; rank < p.ranks; rank++) c.fillText("rank " + rank, 8, rank * (ROW + LANE + GAP) + 16);
}
function paintAll() { DATA.panels.forEach(paint); }
function zoom(factor, at) {
  const span = Math.min((view[1] - view[0]) * factor, end * 1.02);
  const share = (at - view[0]) / (view[1] - view[0]);
  const start = Math.max(-end * 0.01, Math.min(at - share * span, end * 1.01 - span));
  view = [start, start + span];
  paintAll();
}
// The text for a place on a panel: a task, a message, or what is held.
function describe(p, x, y, width) {
  const time = view[0] + (x - LEFT) / scale(width), pitch = ROW + LANE + GAP;
  const rank = Math.floor(y / pitch), inside = y - rank * pitch;
  if (rank < p.ranks) {
    const list = inside < ROW ? p.tasks : inside < ROW + LANE ? p.messages : [];
    const box = list.find(b => b[0] === rank && b[1] <= time && time < b[2]);
    if (box) return `rank ${rank}: ${box[4]}\\n${show(box[1])} to ${show(box[2])}, takes ${show(box[2] - box[1])}`;
    return inside < ROW && time >= 0 && time < p.end ? `rank ${rank} idles at ${show(time)}` : "";
  }
  if (!p.memory.length || time < 0 || time > p.end) return "";
  return `at ${show(time)} held by\\n` + p.memory.map((m, r) => `rank ${r}: ${show(held(m, time))}`).join("\\n");
}
DATA.panels.forEach((p, index) => {
  p.canvas = document.getElementById("panel" + index);
  let drag = null;
  const place = e => {
    const r = p.canvas.getBoundingClientRect();
    return [e.clientX - r.left, e.clientY - r.top, r.width];
  };
  p.canvas.addEventListener("wheel", e => {
    e.preventDefault();
    const [x, , width] = place(e);
    zoom(e.deltaY < 0 ? 0.8 : 1.25, view[0] + (x - LEFT) / scale(width));
  }, { passive: false });
  p.canvas.addEventListener("mousedown", e => { drag = [e.clientX, view[0], view[1]]; });
  window.addEventListener("mouseup", () => { drag = null; });
  p.canvas.addEventListener("mouseleave", () => { tip.style.display = "none"; });
  p.canvas.addEventListener("dblclick", () => { view = [0, end]; paintAll(); });
  p.canvas.addEventListener("mousemove", e => {
    const [x, y, width] = place(e);
    if (drag) {
      const moved = (drag[0] - e.clientX) / scale(width);
      view = [drag[1] + moved, drag[2] + moved];
      paintAll();
    }
    const text = describe(p, x, y, width);
    tip.style.display = text ? "block" : "none";
    tip.textContent = text; tip.style.left = e.clientX + 14 + "px"; tip.style.top = e.clientY + 14 + "px";
  });
});
document.getElementById("in").onclick = () => zoom(0.5, (view[0] + view[1]) / 2);
document.getElementById("out").onclick = () => zoom(2, (view[0] + view[1]) / 2);
document.getElementById("all").onclick = () => { view = [0, end]; paintAll(); };
window.addEventListener("resize", paintAll);
paintAll();
"""
