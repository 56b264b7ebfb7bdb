// The figures, in the order of the page. Each is drawn anew when a control, a series or the width
// changes; colours come from the style sheet, so light and dark need no new drawing.

const data = JSON.parse(document.getElementById("data").textContent);
const on = data.series.map((series) => series.shown);
const COLORS = 8, DASHES = ["", "6 3", "2 3", "8 3 2 3"];
const color = (i) => `var(--c${i % COLORS})`;
const dash = (i) => DASHES[Math.floor(i / COLORS) % DASHES.length];
const label = (i) => data.series[i].label;
const active = () => data.series.map((_, i) => i).filter((i) => on[i]);
const named = (i) => [String(i), label(i)];
const figures = []; // what to draw again

function figure(id, start, draw) {
  // `start(controls, redraw)` makes the controls once; `draw(plot)` fills the plot.
  const section = document.getElementById(id);
  if (!section) return;
  const plot = section.querySelector(".plot");
  const redraw = () => { plot.replaceChildren(); tip.hidden = true; draw(plot); };
  start(section.querySelector(".controls"), redraw);
  figures.push(redraw);
}

function empty(plot, why) { add(plot, "p", {}, why); }

function legend() {
  const nav = document.getElementById("legend");
  if (data.series.length < 2) { nav.remove(); return; }
  const buttons = data.series.map((series, i) => {
    const button = add(nav, "button", { type: "button", "aria-pressed": on[i],
      onclick: () => { on[i] = !on[i]; show(); } });
    const key = add(button, "svg", { width: 22, height: 8 });
    add(key, "line", { x1: 0, x2: 22, y1: 4, y2: 4, "stroke-width": 3,
      "stroke-dasharray": dash(i), style: `stroke: ${color(i)}` });
    add(button, "span", {}, series.label);
    return button;
  });
  const all = (value) => () => { on.fill(value); show(); };
  add(nav, "button", { type: "button", onclick: all(true) }, "all");
  add(nav, "button", { type: "button", onclick: all(false) }, "none");
  function show() {
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", on[i]));
    figures.forEach((redraw) => redraw());
  }
}

// Accuracy and loss over rounds, bytes or seconds

const AXES = { round: ["rounds", plain], bytes: ["bytes up and down", (v) => scaled(v, "B")],
  seconds: ["seconds since the first round", seconds] };
const MEASURES = { accuracy: ["accuracy, by samples", percent],
  accuracy_mean: ["accuracy, mean of clients", percent], test_loss: ["test loss", plain],
  train_loss: ["training loss", plain] };
const over = { x: "round", y: "accuracy" };

function curves(plot) {
  const known = (i) => data.curves[i].filter((p) => p[over.y] && p[over.x] !== null);
  const lines = active().map((i) => [i, known(i)]).filter(([, line]) => line.length);
  if (!lines.length) return empty(plot, "Nothing to show: no series is on, or none has this measure yet.");
  const all = lines.flatMap(([, line]) => line);
  const low = all.map((p) => p[over.y][0] - (p[over.y][1] || 0));
  const high = all.map((p) => p[over.y][0] + (p[over.y][1] || 0));
  const [xTitle, xText] = AXES[over.x], [yTitle, yText] = MEASURES[over.y];
  const most = Math.max(...all.map((p) => p[over.x]));
  const axes = frame(plot, { height: 360, xTitle, yTitle, x: { range: [0, most || 1], text: xText, whole: over.x === "round" },
    y: { range: padded([...low, ...high]), text: (v) => yText(v, 0) } });
  const { svg, toX, toY } = axes;
  const place = (p, shift = 0) => `${toX(p[over.x]).toFixed(1)},${toY(p[over.y][0] + shift).toFixed(1)}`;
  for (const [i, line] of lines) {
    const edge = (p, side) => place(p, side * (p[over.y][1] || 0));
    if (line.some((p) => p[over.y][1])) {
      const ring = [...line.map((p) => edge(p, 1)), ...line.map((p) => edge(p, -1)).reverse()];
      add(svg, "polygon", { class: "band", points: ring.join(" "), style: `fill: ${color(i)}; opacity: ${Math.max(0.06, 0.3 / (1 + lines.length))}` });
    }
    add(svg, "polyline", { class: "curve", points: line.map((p) => place(p)).join(" "), fill: "none",
      "stroke-width": 2, "stroke-dasharray": dash(i), "stroke-linejoin": "round", style: `stroke: ${color(i)}` });
    if (line.length <= 30) for (const p of line) {
      add(svg, "circle", { cx: toX(p[over.x]), cy: toY(p[over.y][0]), r: 2.5, style: `fill: ${color(i)}` });
    }
  }
  const cross = add(svg, "line", { class: "zero", y1: axes.top, y2: axes.bottom, visibility: "hidden" });
  hover(svg, (event, x) => {
    const near = (line) => line.reduce((a, b) => Math.abs(toX(b[over.x]) - x) < Math.abs(toX(a[over.x]) - x) ? b : a);
    const found = lines.map(([i, line]) => [i, near(line)]);
    const at = found.map(([, p]) => p).reduce((a, b) => Math.abs(toX(b[over.x]) - x) < Math.abs(toX(a[over.x]) - x) ? b : a);
    cross.setAttribute("x1", toX(at[over.x]));
    cross.setAttribute("x2", toX(at[over.x]));
    cross.setAttribute("visibility", "visible");
    const here = found.filter(([, p]) => Math.abs(toX(p[over.x]) - toX(at[over.x])) < 12)
      .sort((a, b) => b[1][over.y][0] - a[1][over.y][0]).slice(0, 12);
    const title = over.x === "round" ? `round ${at.round}` : `${xText(at[over.x])}, round ${at.round}`;
    note(event, title, here.map(([i, p]) => {
      const [mean, std, runs] = p[over.y];
      return [label(i), yText(mean, 2) + (std ? ` ± ${yText(std, 2)} (${runs} runs)` : ""), color(i)];
    }));
  }, () => cross.setAttribute("visibility", "hidden"));
}

figure("curves", (controls, redraw) => {
  choice(controls, "over", [["round", "rounds"], ["bytes", "bytes"], ["seconds", "seconds"]], over.x,
    (value) => { over.x = value; redraw(); });
  menu(controls, "show", Object.entries(MEASURES).map(([key, [text]]) => [key, text]), over.y,
    (value) => { over.y = value; redraw(); });
}, curves);

// Accuracy by setting

const asked = { factor: 0, end: "final" };

function factors(plot) {
  const { key, numeric, values } = data.factors[asked.factor], ends = data.ends[asked.end];
  const shown = active().filter((i) => ends[i] && values[i] !== null);
  if (!shown.length) return empty(plot, "Nothing to show: no series is on.");
  const kinds = [...new Set(shown.map((i) => values[i]))];
  if (numeric) kinds.sort((a, b) => a - b);
  const place = (i) => numeric ? values[i] : kinds.indexOf(values[i]);
  const log = numeric && kinds[0] > 0 && kinds.at(-1) / kinds[0] >= 20;
  const range = numeric ? (log ? [kinds[0] / 1.3, kinds.at(-1) * 1.3] : padded(kinds, 0.08)) : [-0.5, kinds.length - 0.5];
  const marks = kinds.length <= 8 ? (numeric ? kinds : kinds.map((_, i) => i)) : null;
  const text = (v) => numeric ? plain(v) : String(kinds[Math.round(v)] ?? "").slice(0, 14);
  const spreads = shown.flatMap((i) => [ends[i][0] - (ends[i][1] || 0), ends[i][0] + (ends[i][1] || 0)]);
  const { svg, toX, toY } = frame(plot, { height: 320, xTitle: key, yTitle: `${asked.end} accuracy, by samples`,
    x: { range, text, ticks: marks, log }, y: { range: padded(spreads, 0.1), text: (v) => percent(v, 0) } });
  for (const i of shown) {
    const [mean, std] = ends[i], x = toX(place(i));
    if (std) add(svg, "line", { x1: x, x2: x, y1: toY(mean - std), y2: toY(mean + std), style: `stroke: ${color(i)}` });
    const dot = add(svg, "circle", { class: "point", cx: x, cy: toY(mean), r: 6, style: `fill: ${color(i)}` });
    hover(dot, (event) => note(event, label(i), [[key, String(values[i])],
      [`${asked.end} accuracy`, percent(mean, 2) + (std ? ` ± ${percent(std, 2)}` : "")]]));
  }
}

figure("factors", (controls, redraw) => {
  menu(controls, "setting", data.factors.map(({ key }, i) => [String(i), key]), "0",
    (value) => { asked.factor = Number(value); redraw(); });
  choice(controls, "accuracy", [["final", "last"], ["best", "best"]], asked.end,
    (value) => { asked.end = value; redraw(); });
}, factors);

// Clients' accuracy

function quantile(sorted, share) {
  const at = (sorted.length - 1) * share, low = Math.floor(at);
  return sorted[low] + (at - low) * (sorted[Math.ceil(at)] - sorted[low]);
}

function rowNames(svg, i, y, extra = "") {
  add(svg, "text", { class: "name", x: 2, y }, label(i) + extra);
}

function clients(plot) {
  const shown = active().filter((i) => data.clients[i].length);
  if (!shown.length) return empty(plot, "Nothing to show: no series is on, or none was evaluated yet.");
  const step = 64, height = shown.length * step + 44;
  const { svg, toX, bottom } = frame(plot, { height, left: 16, xTitle: "accuracy of a client",
    x: { range: [0, 1], text: (v) => percent(v, 0) }, y: { range: [0, 1], text: String, ticks: [] } });
  const dots = [];
  const total = shown.reduce((n, i) => n + data.clients[i].reduce((m, run) => m + run.ids.length, 0), 0);
  shown.forEach((i, row) => {
    const top = row * step + 6, middle = top + 38;
    const all = data.clients[i].flatMap((run) => run.accuracy).sort((a, b) => a - b);
    const [low, half, high] = [0.25, 0.5, 0.75].map((share) => quantile(all, share));
    const mean = all.reduce((a, b) => a + b, 0) / all.length;
    rowNames(svg, i, top + 12, `: median ${percent(half)}, mean ${percent(mean)}, lowest ${percent(all[0])}`);
    const box = add(svg, "rect", { x: toX(low), width: Math.max(1, toX(high) - toX(low)), y: middle - 12, height: 24,
      rx: 3, style: `fill: ${color(i)}; opacity: 0.22` });
    for (const run of data.clients[i]) run.accuracy.forEach((accuracy, k) => {
      const place = [toX(accuracy), middle + ((run.ids[k] * 7919) % 19) - 9];
      dots.push([...place, i, run, k]);
      if (total <= 6000) add(svg, "circle", { class: "client", cx: place[0].toFixed(1), cy: place[1], r: 2.6,
        style: `fill: ${color(i)}; opacity: 0.65` });
    });
    add(svg, "line", { x1: toX(half), x2: toX(half), y1: middle - 13, y2: middle + 13, "stroke-width": 2.5,
      style: `stroke: ${color(i)}` });
    box.dataset.series = i;
  });
  const ring = add(svg, "circle", { r: 5, fill: "none", class: "zero", visibility: "hidden" });
  hover(svg, (event, x, y) => {
    if (y > bottom) return;
    const near = dots.reduce((a, b) => Math.hypot(b[0] - x, b[1] - y) < Math.hypot(a[0] - x, a[1] - y) ? b : a);
    const [cx, cy, i, run, k] = near;
    ring.setAttribute("cx", cx); ring.setAttribute("cy", cy); ring.setAttribute("visibility", "visible");
    note(event, label(i), [[`client ${run.ids[k]} (${run.models.names[run.models.index[k]]}), seed ${run.seed}`,
      percent(run.accuracy[k], 1)]]);
  }, () => ring.setAttribute("visibility", "hidden"));
}

figure("clients", () => {}, clients);

// Client by client

const pair = { a: "0", b: "1", split: "", order: "size" };
const runOf = (i, split) => data.clients[i].find((run) => run.split === split);
const common = (a, b) => a === b ? [] : data.clients[a].map((run) => run.split)
  .filter((split) => split !== null && runOf(b, split));

function differences(split) {
  const [a, b] = [runOf(Number(pair.a), split), runOf(Number(pair.b), split)];
  const other = new Map(b.ids.map((id, k) => [id, b.accuracy[k]]));
  return a.ids.map((id, k) => [id, a.accuracy[k], other.get(id), a.models.names[a.models.index[k]]])
    .filter((row) => row[2] !== undefined);
}

function difference(plot) {
  const [a, b] = [Number(pair.a), Number(pair.b)], splits = common(a, b);
  if (!splits.length) return empty(plot, "These two have no run in common in which their clients hold the same data.");
  const split = splits.includes(Number(pair.split)) ? Number(pair.split) : splits[0];
  const rows = differences(split), change = (row) => row[1] - row[2];
  rows.sort(pair.order === "size" ? (p, q) => change(q) - change(p) : (p, q) => p[0] - q[0]);
  const every = splits.flatMap(differences), count = (test) => every.filter((row) => test(change(row))).length;
  const mean = every.reduce((sum, row) => sum + change(row), 0) / every.length;
  add(plot, "p", { class: "verdict" }, `${label(a)} is better for ${count((d) => d > 0)} of ${every.length} clients, ` +
    `${label(b)} for ${count((d) => d < 0)}, equal for ${count((d) => d === 0)}; mean difference ${points(mean)}` +
    (splits.length > 1 ? `, over ${splits.length} seeds; one is drawn.` : "."));
  const { svg, toX, toY } = frame(plot, { height: 300, xTitle: pair.order === "size" ? "clients, by difference" : "client",
    yTitle: `accuracy of ${label(a)} less that of ${label(b)}`,
    x: { range: [-0.5, rows.length - 0.5], ticks: pair.order === "size" ? [] : null, text: (v) => String(rows[v]?.[0] ?? "") },
    y: { range: padded([0, ...rows.map(change)]), text: (v) => (100 * v).toFixed(0).replace("-", "−") } });
  const width = Math.max(1, (toX(1) - toX(0)) * 0.8);
  rows.forEach((row, k) => {
    const ends = [toY(0), toY(change(row))], side = change(row) > 0 ? a : b;
    add(svg, "rect", { class: "bar", x: toX(k) - width / 2, width, y: Math.min(...ends),
      height: Math.max(0.5, Math.abs(ends[0] - ends[1])), style: `fill: ${color(side)}` });
  });
  add(svg, "line", { class: "zero", x1: toX(-0.5), x2: toX(rows.length - 0.5), y1: toY(0), y2: toY(0) });
  hover(svg, (event, x) => {
    const k = Math.round((x - toX(0)) / (toX(1) - toX(0) || 1)), row = rows[k];
    if (!row) { tip.hidden = true; return; }
    note(event, `client ${row[0]} (${row[3]}): ${points(change(row))}`,
      [[label(a), percent(row[1]), color(a)], [label(b), percent(row[2]), color(b)]]);
  });
}

figure("difference", (controls, redraw) => {
  const able = data.series.map((_, i) => i).filter((i) => data.series.some((_, j) => common(i, j).length));
  pair.a = String(able[0]);
  pair.b = String(able.find((j) => common(able[0], j).length));
  const seeds = () => {
    const splits = common(Number(pair.a), Number(pair.b));
    select.replaceChildren();
    for (const split of splits) {
      add(select, "option", { value: split }, `seed ${runOf(Number(pair.a), split).seed}`);
    }
    pair.split = String(splits[0] ?? "");
  };
  const change = (side) => (value) => { pair[side] = value; seeds(); redraw(); };
  menu(controls, "of", able.map(named), pair.a, change("a"));
  menu(controls, "less", able.map(named), pair.b, change("b"));
  const select = menu(controls, "in", [], "", (value) => { pair.split = value; redraw(); });
  choice(controls, "order", [["size", "difference"], ["client", "client"]], pair.order,
    (value) => { pair.order = value; redraw(); });
  seeds();
}, difference);

// Classes over clients

const dealt = { split: 0, part: "train" };

function classes(plot) {
  const rows = data.splits[dealt.split][dealt.part], kinds = rows[0]?.length || 0;
  if (!kinds) return empty(plot, "No client holds anything.");
  const most = Math.max(1, ...rows.flat()), left = 52;
  const width = Math.max(260, plot.clientWidth), cell = (width - left - 4) / rows.length;
  const tall = Math.max(3, Math.min(22, 420 / kinds)), height = kinds * tall;
  const canvas = add(plot, "canvas", { role: "img", "aria-label": "samples of each class, by client" });
  const sharp = devicePixelRatio || 1;
  [canvas.width, canvas.height] = [width * sharp, (height + 34) * sharp];
  canvas.style.width = `${width}px`;
  const pen = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  const heat = style.getPropertyValue("--heat"), soft = style.getPropertyValue("--soft");
  pen.scale(sharp, sharp);
  rows.forEach((row, client) => row.forEach((count, kind) => {
    pen.fillStyle = count ? `rgba(${heat}, ${0.12 + 0.88 * Math.sqrt(count / most)})` : `rgba(${heat}, 0.03)`;
    const gap = cell > 4 ? 0.6 : 0;
    pen.fillRect(left + client * cell, kind * tall, cell - gap, tall - (tall > 5 ? 0.6 : 0));
  }));
  pen.fillStyle = soft;
  pen.font = "12px system-ui, sans-serif";
  pen.textAlign = "right";
  for (const kind of ticks(0, kinds - 1, Math.min(kinds - 1, height / 16)).filter(Number.isInteger)) {
    pen.fillText(String(kind), left - 6, kind * tall + tall / 2 + 4);
  }
  pen.textAlign = "center";
  for (const id of ticks(0, rows.length - 1, Math.min(rows.length - 1, width / 60)).filter(Number.isInteger)) {
    pen.fillText(String(id), left + (id + 0.5) * cell, height + 14);
  }
  pen.fillText("client", (left + width) / 2, height + 30);
  pen.textAlign = "left";
  pen.fillText("class", 0, 12);
  hover(canvas, (event, x, y) => {
    const id = Math.floor((x - left) / cell), kind = Math.floor(y / tall);
    if (rows[id]?.[kind] === undefined) { tip.hidden = true; return; }
    const own = rows[id].reduce((a, b) => a + b, 0);
    note(event, `client ${id}, class ${kind}`, [["samples", String(rows[id][kind])],
      ["of the client's", `${own} in ${rows[id].filter(Boolean).length} classes`]]);
  });
}

figure("classes", (controls, redraw) => {
  menu(controls, "of", data.splits.map((split, i) => [String(i), split.label]), "0",
    (value) => { dealt.split = Number(value); redraw(); });
  choice(controls, "part", [["train", "training"], ["test", "test"]], dealt.part,
    (value) => { dealt.part = value; redraw(); });
}, classes);

// Traffic by message field

const sent = { unit: "bytes", scale: "linear" };

function traffic(plot) {
  const shown = active().filter((i) => data.traffic[i].length);
  if (!shown.length) return empty(plot, "Nothing to show: no series is on, or nothing was sent.");
  const rows = shown.flatMap((i) => data.traffic[i]), most = Math.max(1, ...rows.map((row) => row[sent.unit]));
  const share = (v) => sent.scale === "log" ? Math.log1p(v) / Math.log1p(most) : v / most;
  const width = Math.max(260, plot.clientWidth), line = 24, left = Math.min(190, width * 0.38), room = width - left - 84;
  const height = shown.length * 28 + rows.length * line + 8;
  const svg = add(plot, "svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  let y = 6;
  for (const i of shown) {
    rowNames(svg, i, y + 14);
    y += 22;
    for (const row of data.traffic[i]) {
      const name = `${row.direction === "up" ? "↑" : "↓"} ${row.field}`, value = row[sent.unit], size = share(value) * room;
      add(svg, "text", { x: left - 8, y: y + 14, "text-anchor": "end" }, name.length > 26 ? `${name.slice(0, 25)}…` : name);
      const bar = add(svg, "rect", { class: "bar", x: left, y: y + 2, height: line - 8, rx: 2,
        width: Math.max(value ? 1.5 : 0, size), style: `fill: ${color(i)}` });
      add(svg, "text", { x: left + size + 6, y: y + 14 }, scaled(value, sent.unit === "bytes" ? "B" : ""));
      hover(bar, (event) => note(event, `${label(i)}: ${name}`,
        [["bytes", row.bytes.toLocaleString("en")], ["scalars", row.scalars.toLocaleString("en")]]));
      y += line;
    }
    y += 6;
  }
}

figure("traffic", (controls, redraw) => {
  choice(controls, "count", [["bytes", "bytes"], ["scalars", "scalars"]], sent.unit,
    (value) => { sent.unit = value; redraw(); });
  choice(controls, "scale", [["linear", "linear"], ["log", "logarithmic"]], sent.scale,
    (value) => { sent.scale = value; redraw(); });
}, traffic);

// Time by phase

const SHADES = { training: 1, evaluation: 0.6, idle: 0.25 };

function time(plot) {
  const shown = active().filter((i) => Object.keys(data.time[i]).length);
  if (!shown.length) return empty(plot, "Nothing to show: no series is on.");
  const whole = (i) => Object.keys(SHADES).reduce((sum, phase) => sum + (data.time[i][phase] || 0), 0);
  const most = Math.max(...shown.map(whole)) || 1, width = Math.max(260, plot.clientWidth);
  const narrow = width < 560, step = narrow ? 82 : 66;
  const keys = add(plot, "div", { class: "keys" });
  for (const [phase, shade] of Object.entries(SHADES)) {
    const key = add(keys, "span");
    add(key, "i", { style: `background: var(--ink); opacity: ${shade}` });
    key.append(phase);
  }
  const height = shown.length * step + 4;
  const svg = add(plot, "svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  shown.forEach((i, row) => {
    const spent = data.time[i], beside = ["server", "start"].filter((phase) => phase in spent);
    const words = (phases) => phases.filter((phase) => phase in spent).map((phase) => `${phase} ${seconds(spent[phase])}`);
    rowNames(svg, i, row * step + 14);
    const lines = narrow ? [Object.keys(SHADES), beside] : [[...Object.keys(SHADES), ...beside]];
    lines.forEach((phases, k) => add(svg, "text", { x: 2, y: row * step + 52 + 16 * k }, words(phases).join(", ")));
    let x = 2;
    for (const [phase, shade] of Object.entries(SHADES)) {
      const size = ((spent[phase] || 0) / most) * (width - 4);
      const bar = add(svg, "rect", { class: "bar", x, y: row * step + 20, width: size, height: 18,
        style: `fill: ${color(i)}; opacity: ${shade}` });
      hover(bar, (event) => note(event, label(i), [[phase, seconds(spent[phase])],
        ["of the actors' time", percent(spent[phase] / whole(i))]]));
      x += size;
    }
  });
}

figure("time", () => {}, time);

// Text to copy, the theme, and the first drawing

for (const box of document.querySelectorAll("details.text")) {
  const forms = [...box.querySelectorAll(".form")], row = document.createElement("div");
  row.className = "controls";
  box.querySelector("summary").after(row);
  let shown = "Markdown";
  const show = (name) => { shown = name; forms.forEach((form) => { form.hidden = form.dataset.form !== name; }); };
  choice(row, "as", forms.map((form) => [form.dataset.form, form.dataset.form]), shown, show);
  const copy = add(row, "button", { type: "button", class: "copy", onclick: async () => {
    const pre = forms.find((form) => form.dataset.form === shown).querySelector("pre");
    getSelection().selectAllChildren(pre); // also what remains if the browser does not let us copy
    let done = true;
    try { await navigator.clipboard.writeText(pre.textContent); }
    catch { done = document.execCommand("copy"); }
    copy.textContent = done ? "copied" : "selected: press Ctrl-C";
    setTimeout(() => { copy.textContent = "copy"; }, 2000);
  } }, "copy");
  show(shown);
}

const root = document.documentElement, theme = document.getElementById("theme");
theme.addEventListener("click", () => {
  const next = { auto: "light", light: "dark", dark: "auto" }[root.dataset.theme || "auto"];
  if (next === "auto") delete root.dataset.theme; else root.dataset.theme = next;
  theme.textContent = `theme: ${next}`;
  figures.forEach((redraw) => redraw()); // the one that is a picture holds colours
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => figures.forEach((redraw) => redraw()));

legend();
let width = 0;
new ResizeObserver(() => {
  if (document.body.clientWidth === width) return;
  width = document.body.clientWidth;
  figures.forEach((redraw) => redraw());
}).observe(document.body);
