"use strict";
// What every figure is made of: elements, axes, numbers as text, and the note at the pointer.

const SVG = "http://www.w3.org/2000/svg";

function add(parent, tag, attributes = {}, text = null) {
  const inside = parent.namespaceURI === SVG || tag === "svg";
  const node = inside ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "onclick" || key === "onchange") node.addEventListener(key.slice(2), value);
    else if (value !== null) node.setAttribute(key, value);
  }
  if (text !== null) node.textContent = text; // never markup: names come from users
  parent.append(node);
  return node;
}

function choice(parent, title, options, value, change) {
  // A row of buttons of which one is pressed.
  const label = add(parent, "label", {}, title);
  const box = add(label, "span", { class: "choice", role: "group", "aria-label": title });
  const buttons = options.map(([key, text]) =>
    add(box, "button", { type: "button", "data-value": key, "aria-pressed": key === value,
      onclick: () => {
        for (const each of buttons) each.setAttribute("aria-pressed", each.dataset.value === key);
        change(key);
      } }, text));
}

function menu(parent, title, options, value, change) {
  const label = add(parent, "label", {}, title);
  const select = add(label, "select", { onchange: () => change(select.value), "aria-label": title });
  for (const [key, text] of options) add(select, "option", { value: key }, text);
  select.value = value;
  return select;
}

// Numbers

const percent = (share, places = 1) => `${(100 * share).toFixed(places)} %`;
const points = (share) => `${share > 0 ? "+" : share < 0 ? "−" : ""}${Math.abs(100 * share).toFixed(1)} points`;
const plain = (value) => Number(value.toPrecision(4)).toString();

function scaled(value, unit = "") {
  let prefix = "";
  for (const next of ["k", "M", "G", "T", "P"]) {
    if (Math.abs(value) < 999.5) break;
    value /= 1000;
    prefix = next;
  }
  return `${Number(value.toPrecision(3))} ${prefix}${unit}`.trim();
}

function seconds(value) {
  if (value < 60) return `${Number(value.toPrecision(3))} s`;
  const whole = Math.round(value), pad = (n) => String(n).padStart(2, "0");
  const [h, m, s] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  return h ? `${h}:${pad(m)}:${pad(s)}` : `${m}:${pad(s)} min`;
}

function ticks(low, high, count) {
  const raw = (high - low) / Math.max(1, count) || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= raw * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
}

// Axes

function frame(plot, { height, x, y, left = 52, bottom = 40, xTitle = "", yTitle = "" }) {
  // x and y: {range: [low, high], text, ticks?, log?, whole?}; returns the drawing and its scales.
  const width = Math.max(260, plot.clientWidth), top = 22, right = 22;
  const svg = add(plot, "svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  const scale = ({ range: [low, high], log }, from, to) => {
    const f = log ? Math.log : (v) => v;
    const span = f(high) - f(low) || 1;
    return (v) => from + ((f(v) - f(low)) / span) * (to - from);
  };
  const toX = scale(x, left, width - right), toY = scale(y, height - bottom, top);
  for (const value of y.ticks || ticks(...y.range, 5)) {
    const at = toY(value);
    add(svg, "line", { class: "grid", x1: left, x2: width - right, y1: at, y2: at });
    add(svg, "text", { x: left - 6, y: at + 4, "text-anchor": "end" }, y.text(value));
  }
  const across = x.ticks || ticks(...x.range, Math.floor((width - left) / 90));
  for (const value of x.whole ? across.filter(Number.isInteger) : across) {
    const at = toX(value);
    add(svg, "line", { class: "grid", x1: at, x2: at, y1: height - bottom, y2: height - bottom + 4 });
    add(svg, "text", { x: at, y: height - bottom + 18, "text-anchor": "middle" }, x.text(value));
  }
  add(svg, "text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, xTitle);
  add(svg, "text", { x: 2, y: 12 }, yTitle);
  return { svg, toX, toY, width, left, right: width - right, top, bottom: height - bottom };
}

function padded(values, share = 0.05) {
  // The range of all values with a little room, so that no line lies on the frame.
  const low = Math.min(...values), high = Math.max(...values);
  const room = (high - low || Math.abs(high) || 1) * share;
  return [low - room, high + room];
}

// The note at the pointer

const tip = document.getElementById("tip");

function note(event, title, rows = []) {
  tip.replaceChildren();
  add(tip, "b", {}, title);
  for (const [name, value, color] of rows) {
    const row = add(tip, "div", { class: "row" });
    add(row, "span", color ? { style: `color: ${color}` } : {}, name);
    add(row, "span", {}, value);
  }
  tip.hidden = false;
  const box = tip.getBoundingClientRect(), gap = 14;
  const x = event.clientX + gap + box.width > innerWidth ? event.clientX - gap - box.width : event.clientX + gap;
  const y = Math.min(event.clientY + gap, innerHeight - box.height - 4);
  tip.style.left = `${Math.max(4, x)}px`;
  tip.style.top = `${Math.max(4, y)}px`;
}

function hover(node, move, leave = () => {}) {
  // `move` gets the event and the pointer's place in the drawing; a touch counts as a move.
  const act = (event) => {
    const box = node.getBoundingClientRect();
    move(event, event.clientX - box.left, event.clientY - box.top);
  };
  node.addEventListener("pointermove", act);
  node.addEventListener("pointerdown", act);
  node.addEventListener("pointerleave", () => { tip.hidden = true; leave(); });
}
