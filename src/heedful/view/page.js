// Draws what the JSON beside it holds. Texts become text nodes, never markup.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

// ---- numbers and elements

const whole = (number) => Math.round(number).toLocaleString("en");
const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)} %`;
const PREFIXES = ["", "k", "M", "G", "T", "P"];

function human(number) {
  let at = 0;
  for (; number >= 999.5 && at < PREFIXES.length - 1; at++) number /= 1000;
  const digits = number >= 99.5 || !at ? number.toFixed(0) : String(Number(number.toPrecision(3)));
  return at ? `${digits} ${PREFIXES[at]}` : digits;
}

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function shape(name, attributes, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// What is seen of a token: spaces and line ends too, and nothing that could move a cursor.
function visible(text) {
  if (text === "") return "·";
  const picture = (c) => (c < " " ? String.fromCharCode(0x2400 + c.charCodeAt(0)) : "�");
  const shown = text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll("\r", "␍");
  return shown.replace(/[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/g, picture);
}
const quoted = (text) => `“${visible(text).replaceAll(" ", "␣")}”`;

function bytes(text) {
  return Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
}

// Bold where a piece is an array of one: say(out, "plain ", ["bold"]).
function say(out, ...pieces) {
  out.replaceChildren(...pieces.map((piece) => (Array.isArray(piece) ? element("b", {}, piece[0]) : piece)));
}

// A cursor over columns and rows of a thing that is drawn: arrow keys, Home, End, the pointer. move(column, row) shows it.
function cursor(target, { columns, rows = 1, label, at = [0, 0], find, move }) {
  let [column, row] = at;
  target.tabIndex = 0;
  target.setAttribute("role", "application");
  target.setAttribute("aria-label", label);
  const go = (x, y) => {
    column = Math.max(0, Math.min(columns - 1, x));
    row = Math.max(0, Math.min(rows - 1, y));
    move(column, row);
  };
  const leap = rows === 1 ? Math.max(2, Math.round(columns / 20)) : 0;
  target.addEventListener("keydown", (event) => {
    const to = {
      ArrowRight: [column + 1, row],
      ArrowLeft: [column - 1, row],
      ArrowDown: [column + leap, row + 1],
      ArrowUp: [column - leap, row - 1],
      Home: [0, row],
      End: [columns - 1, row],
    }[event.key];
    if (!to || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    go(...to);
  });
  const point = (event) => {
    const found = find(event);
    if (found) go(...found);
  };
  target.addEventListener("pointermove", point);
  target.addEventListener("pointerdown", point);
  go(column, row);
  return go;
}

function fromBox(target, columns, rows) {
  return (event) => {
    const box = target.getBoundingClientRect();
    return [
      Math.floor(((event.clientX - box.left) / box.width) * columns),
      Math.floor(((event.clientY - box.top) / box.height) * rows),
    ];
  };
}

// ---- colour: dark to bright on dark paper, pale to deep on light paper

const isDark = matchMedia("(prefers-color-scheme: dark)");
const RAMPS = {
  light: [[243, 241, 234], [168, 207, 214], [74, 150, 176], [35, 90, 143], [38, 34, 92]],
  dark: [[28, 33, 39], [38, 70, 104], [36, 125, 142], [110, 197, 118], [249, 231, 78]],
};

function heat(share) {
  const stops = RAMPS[isDark.matches ? "dark" : "light"];
  const place = Math.max(0, Math.min(1, share)) * (stops.length - 1);
  const low = Math.min(Math.floor(place), stops.length - 2);
  const mixed = stops[low].map((from, i) => Math.round(from + (stops[low + 1][i] - from) * (place - low)));
  return `rgb(${mixed.join(" ")})`;
}

// A canvas as wide as its place and as sharp as the screen. paint(context, width, height).
function painted(canvas, heightOf, paint) {
  const draw = () => {
    const width = canvas.clientWidth || 300;
    const height = heightOf(width);
    const sharp = devicePixelRatio || 1;
    canvas.width = Math.round(width * sharp);
    canvas.height = Math.round(height * sharp);
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.scale(sharp, sharp);
    paint(context, width, height);
  };
  new ResizeObserver(draw).observe(canvas);
  isDark.addEventListener("change", draw);
  return draw;
}

// A chart is drawn for the width of its place, so that its text stays as large as other text.
function whenSized(target, draw) {
  let drawn = 0;
  new ResizeObserver(() => {
    const width = Math.round(target.clientWidth);
    if (width && width !== drawn) draw((drawn = width));
  }).observe(target);
}

function ink() {
  return getComputedStyle(document.documentElement).color;
}

function frame(context, x, y, width, height) {
  context.strokeStyle = ink();
  context.lineWidth = 2;
  context.strokeRect(x + 0.5, y + 0.5, Math.max(3, width - 1), Math.max(3, height - 1));
}

// ---- head of the page

const { receipt } = data;
const NAMES = {
  full: "full attention",
  window: "in the window",
  sink: "sinks",
  selected: "chosen pages",
  again: "wrong guesses and repeats",
  saved_window: "saved by the window",
  saved_pages: "saved by choosing pages",
  saved_prefix: "saved by the prefix",
};
const MADE = ["full", "window", "sink", "selected"];
const SAVED = ["saved_window", "saved_pages", "saved_prefix"];

function showHead() {
  const { visits, kv } = receipt;
  byId("about").textContent = `${data.model} · ${data.policy} · ${whole(receipt.prompt_tokens)} tokens in, ${whole(receipt.output_tokens)} out`;
  const tiles = [
    ["token visits", human(visits.total)],
    ["dense would be", human(visits.dense)],
    ["saved", percent(1 - visits.total / visits.dense)],
    ["KV read", `${human(kv.bytes_read)}B`],
    ["visits of under 0.1 % weight", percent(meanLight())],
  ];
  byId("tiles").replaceChildren(...tiles.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
  byId("receipt").textContent = data.receipt_line;
  byId("version").textContent = data.heedful;
  const queries = data.queries.at.length;
  byId("num-queries").textContent =
    queries >= data.computed_tokens ? `all ${whole(queries)} queries` : `${whole(queries)} sampled queries`;
  byId("page-len").textContent = data.shape.page_len;
}

// Each head of a layer weighs as much as it made visits.
function meanLight() {
  const { light, visits } = data.layers;
  const sum = visits.reduce((total, count) => total + count, 0);
  const mean = (row) => row.reduce((total, share) => total + share, 0) / row.length;
  return light.reduce((total, row, layer) => total + (mean(row) * visits[layer]) / (sum || 1), 0);
}

// ---- visits, step by step

const MOST_COLUMNS = 360;

function showSum() {
  const sums = {};
  for (const step of data.steps) for (const part of [...MADE, ...SAVED]) sums[part] = (sums[part] || 0) + (step[part] || 0);
  const made = MADE.reduce((total, part) => total + sums[part], 0);
  sums.again = receipt.visits.total - made;
  const parts = [...MADE, "again", ...SAVED].filter((part) => sums[part] > 0);
  const { total, dense } = receipt.visits;
  const bar = element("div", { class: "bar", role: "img", "aria-label": `${whole(total)} visits of ${whole(dense)} dense` });
  for (const part of parts) {
    const piece = element("span", { class: styleOf(part), "data-part": part, "data-visits": sums[part] });
    piece.style.flexGrow = sums[part] / dense;
    bar.append(piece);
  }
  const items = parts.map((part) => {
    const item = element("li", {}, element("i", { class: styleOf(part) }), `${NAMES[part]} `, element("b", {}, whole(sums[part])));
    return item;
  });
  const all = element("li", {}, element("b", { id: "total" }, whole(total)), " visits of ", element("b", { id: "dense" }, whole(dense)), " dense");
  byId("sum").replaceChildren(bar, element("ul", { class: "legend" }, all, ...items));
}

const styleOf = (part) => (part.startsWith("saved") ? "saved" : part);

// Steps that stand beside each other share a column where there are too many.
function columnsOf(steps) {
  const decode = steps.filter(({ kind }) => kind === "decode").length;
  const per = Math.max(1, Math.ceil(decode / MOST_COLUMNS));
  const columns = [];
  for (const step of steps) {
    const last = columns.at(-1);
    const joins = last && step.kind === "decode" && last.kind === "decode" && last.steps < per && last.end === step.start;
    const column = joins ? last : { kind: step.kind, start: step.start, end: step.end, steps: 0 };
    for (const part of [...MADE, ...SAVED]) column[part] = (column[part] || 0) + (step[part] || 0);
    column.end = Math.max(column.end, step.end);
    column.steps += 1;
    if (!joins) columns.push(column);
  }
  return columns;
}

function showSteps() {
  const columns = columnsOf(data.steps);
  if (!columns.length) return;
  const target = byId("steps");
  const left = 52;
  let place = null; // of the drawing: {wide, mark}
  let now = columns.length - 1;
  const mark = () => place.mark.setAttribute("x", left + now * place.wide);
  whenSized(target, (width) => {
    const wide = (width - left) / columns.length;
    place = { wide, mark: shape("rect", { class: "cursor", y: 0, width: Math.max(2, wide), height: 198 }) };
    target.replaceChildren(stepsDrawing(columns, width, left, wide, place.mark));
    mark();
  });
  cursor(target, {
    columns: columns.length,
    label: "Visits of each step. Arrow keys move from step to step.",
    at: [now, 0],
    find: (event) => [Math.floor((event.clientX - target.getBoundingClientRect().left - left) / place.wide), 0],
    move: (i) => {
      now = i;
      if (place) mark();
      sayStep(columns[i]);
    },
  });
}

const ofToken = (column, parts) => parts.reduce((total, part) => total + (column[part] || 0), 0) / (column.end - column.start);

function stepsDrawing(columns, width, left, wide, mark) {
  const [height, bottom] = [220, 22];
  const top = Math.max(...columns.map((column) => ofToken(column, [...MADE, ...SAVED])));
  const y = (value) => (height - bottom) * (1 - value / top) + 8 * (value / top);
  const drawing = shape("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  for (const share of [0, 0.5, 1]) {
    drawing.append(shape("path", { class: "grid", d: `M${left} ${y(top * share)}H${width}` }));
    drawing.append(shape("text", { x: left - 6, y: y(top * share) + 4, "text-anchor": "end" }, human(top * share)));
  }
  columns.forEach((column, i) => {
    let base = 0;
    for (const part of [...MADE, ...SAVED]) {
      const value = ofToken(column, [part]);
      if (!value) continue;
      const box = { x: left + i * wide, width: Math.max(0.5, wide - (wide > 4 ? 1 : 0)), y: y(base + value) };
      drawing.append(shape("rect", { class: styleOf(part), ...box, height: y(base) - box.y }));
      base += value;
    }
  });
  const labels = { cached: "there already", prefill: "reading", decode: "writing" };
  let from = left;
  columns.forEach(({ kind }, i) => {
    if (i && columns[i - 1].kind === kind) return;
    from = Math.max(from, left + i * wide);
    drawing.append(shape("text", { x: Math.min(from, width - 40), y: height - 6 }, labels[kind]));
    from += 12 + 6 * labels[kind].length;
  });
  drawing.append(mark);
  return drawing;
}

function sayStep(column) {
  const [made, dense] = [ofToken(column, MADE), ofToken(column, [...MADE, ...SAVED])];
  const tokens = column.end - column.start;
  const where = tokens === 1 ? `Token ${whole(column.start)}` : `Tokens ${whole(column.start)} to ${whole(column.end - 1)}`;
  const parts = [...MADE, ...SAVED].filter((part) => column[part]).map((part) => `${NAMES[part]} ${whole(column[part])}`);
  const kind = { prefill: "reading", decode: "writing", cached: "from a shared prefix" }[column.kind];
  say(byId("steps-said"), [`${where}, ${kind}: `], parts.join(" · "), tokens > 1 ? ` · ${whole(made)} of ${whole(dense)} a token` : "");
}

// ---- layers and heads

const METRICS = {
  light: ["carried under 0.1 %", (x) => percent(x)],
  entropy: ["entropy", (x) => `${x.toFixed(2)} bits`],
  distance: ["mean distance", (x) => `${x.toFixed(1)} tokens`],
  sink_mass: ["sink mass", (x) => percent(x)],
  visits: ["visits", (x) => whole(x)],
  kept: ["kept by the policy", (x) => percent(x)],
};

function showHeads() {
  const { layers, heads, kv_heads: groups } = data.shape;
  const value = (metric, layer, head) => (metric === "visits" ? data.layers.visits[layer] : data.layers[metric][layer][head]);
  const shown = Object.keys(METRICS).filter((name) => name !== "kept" || data.layers.kept.flat().some((share) => share < 0.9999));
  let metric = shown[0];
  let at = [0, 0];
  const canvas = byId("heads");
  const range = () => {
    const all = Array.from({ length: layers * heads }, (_, i) => value(metric, Math.floor(i / heads), i % heads));
    return [Math.min(...all), Math.max(...all)];
  };
  const draw = painted(
    canvas,
    (width) => Math.max(90, Math.min(420, heads * Math.min(26, Math.max(7, width / layers)))),
    (context, width, height) => {
      const [low, high] = range();
      const [wide, tall] = [width / layers, height / heads];
      for (let layer = 0; layer < layers; layer++)
        for (let head = 0; head < heads; head++) {
          context.fillStyle = heat(high > low ? (value(metric, layer, head) - low) / (high - low) : 0.5);
          const newGroup = head && head % (heads / groups) === 0 ? 2 : 0;
          context.fillRect(layer * wide, head * tall + newGroup, wide - (wide > 6 ? 1 : 0), tall - newGroup - (tall > 6 ? 1 : 0));
        }
      frame(context, at[0] * wide, at[1] * tall, wide, tall);
    },
  );
  const ramp = () => {
    const [low, high] = range();
    const form = METRICS[metric][1];
    const band = element("span");
    band.style.background = `linear-gradient(to right, ${[0, 0.25, 0.5, 0.75, 1].map(heat).join(", ")})`;
    byId("ramp").replaceChildren(form(low), band, form(high));
  };
  choices("metrics", shown.map((name) => [name, METRICS[name][0]]), (name) => {
    metric = name;
    draw();
    ramp();
  });
  isDark.addEventListener("change", ramp);
  cursor(canvas, {
    columns: layers,
    rows: heads,
    label: "Map of layers and heads. Left and right change the layer, up and down the head.",
    find: fromBox(canvas, layers, heads),
    move: (layer, head) => {
      at = [layer, head];
      draw();
      const words = shown.map((name) => `${METRICS[name][0]} ${METRICS[name][1](value(name, layer, head))}`);
      say(byId("heads-said"), [`Layer ${layer}, head ${head}: `], words.join(" · "));
    },
  });
}

// Radio buttons in a fieldset; onChoice(name) is called at once with the first.
function choices(id, pairs, onChoice) {
  for (const [i, [name, label]] of pairs.entries()) {
    const input = element("input", { type: "radio", name: id, value: name });
    input.checked = i === 0;
    input.addEventListener("change", () => onChoice(name));
    byId(id).append(element("label", {}, input, label));
  }
  onChoice(pairs[0][0]);
}

// ---- pages over steps

const FORMATS = ["full", "window", "selected", "sink"];

function showPages() {
  const { at: rowsAt, count, shared, formats } = data.pages;
  const { layers } = data.shape;
  const [mass, read, held] = [data.pages.mass, data.pages.read, data.pages.held].map(bytes);
  const rows = rowsAt.length;
  if (!rows) return;
  const names = [...new Set(formats.flat().map(([name]) => name))];
  let [layer, page, row] = [layers, 0, rows - 1];
  const share = (y, x) => (mass[(layer * rows + y) * count + x] / 255) ** 2;
  const exists = (y, x) => x * data.shape.page_len <= rowsAt[y];
  const [canvas, strip, slider, select] = ["pages", "formats", "page-row", "page-layer"].map(byId);
  for (const one of [canvas, strip]) one.style.maxWidth = `${56 * count}px`;
  const draw = painted(
    canvas,
    () => Math.max(60, Math.min(320, rows * 12)),
    (context, width, height) => {
      const [wide, tall] = [width / count, height / rows];
      for (let y = 0; y < rows; y++)
        for (let x = 0; x < count; x++) {
          if (!exists(y, x)) continue;
          const box = [x * wide, y * tall, wide - (wide > 6 ? 1 : 0), tall - (tall > 5 ? 1 : 0)];
          const isHeld = held[y * count + x] > 0;
          if (isHeld || share(y, x) > 0) context.fillStyle = heat(Math.sqrt(share(y, x)));
          context.globalAlpha = isHeld ? 1 : 0.25;
          context.fillRect(...box);
          context.globalAlpha = 1;
          if (isHeld && read[y * count + x] < 128) strike(context, ...box);
        }
      frame(context, page * wide, row * tall, wide, tall);
    },
  );
  const drawStrip = painted(strip, () => 14, (context, width) => {
    const wide = width / count;
    for (const [name, begin, end] of formats[row])
      for (let x = begin; x < Math.min(end, count); x++) {
        if (!held[row * count + x]) continue;
        context.fillStyle = colourOf(FORMATS[names.indexOf(name) % FORMATS.length]);
        context.fillRect(x * wide, x < shared ? 5 : 0, wide - (wide > 3 ? 1 : 0), x < shared ? 9 : 14);
      }
  });
  const tell = () => {
    const format = formats[row].find(([, begin, end]) => begin <= page && page < end)?.[0];
    const y = row * count + page;
    const words = exists(row, page)
      ? [
          `${percent(share(row, page))} of the weight`,
          format ? `in ${format}` : "",
          held[y] ? (held[y] < 255 ? `held in ${percent(held[y] / 255, 0)} of layers` : "held") : "not held",
          `read by ${percent(read[y] / 255, 0)} of layers and KV heads`,
          page < shared ? "from a shared prefix" : "",
        ].filter(Boolean)
      : ["not written yet"];
    const first = page * data.shape.page_len;
    say(byId("pages-said"), [`Query ${whole(rowsAt[row])}, page ${page} (tokens from ${whole(first)}): `], words.join(" · "));
  };
  const go = cursor(canvas, {
    columns: count,
    rows,
    at: [0, rows - 1],
    label: "Map of pages over queries. Left and right change the page, up and down the query.",
    find: fromBox(canvas, count, rows),
    move: (x, y) => {
      [page, row] = [x, y];
      slider.value = row;
      draw();
      drawStrip();
      tell();
    },
  });
  slider.max = rows - 1;
  slider.value = row;
  slider.addEventListener("input", () => go(page, Number(slider.value)));
  select.append(element("option", { value: layers }, "mean of all"));
  for (let i = 0; i < layers; i++) select.append(element("option", { value: i }, `layer ${i}`));
  select.addEventListener("change", () => {
    layer = Number(select.value);
    draw();
    tell();
  });
  const items = names.map((name, i) => element("li", {}, element("i", { class: FORMATS[i % FORMATS.length] }), `held as ${name}`));
  if (shared) items.push(element("li", {}, `lower boxes: from a shared prefix (${shared} pages)`));
  byId("format-names").replaceChildren(...items);
}

// The colour that a class paints with, as a canvas understands it.
function colourOf(name) {
  const probe = document.body.appendChild(element("i", { class: name }));
  const colour = getComputedStyle(probe).backgroundColor;
  probe.remove();
  return colour;
}

function strike(context, x, y, width, height) {
  context.strokeStyle = ink();
  context.globalAlpha = 0.45;
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(x + width * 0.2, y + height / 2);
  context.lineTo(x + width * 0.8, y + height / 2);
  context.stroke();
  context.globalAlpha = 1;
}

// ---- what less would keep

const CURVES = { window: "window", sinks: "window and 4 sinks", pages: "chosen pages, decoding" };

function showCoverage() {
  const { curves, recommended, quality, measure, dense_visits: dense, queries } = data.coverage;
  byId("cover-queries").textContent = `${whole(queries)} ${queries === 1 ? "query" : "queries"}`;
  whenSized(byId("cover"), (width) => byId("cover").replaceChildren(coverageDrawing(curves, width)));
  const items = Object.entries(CURVES).map(([name, words]) => element("li", {}, element("i", { class: name }), words));
  byId("cover-names").replaceChildren(...items, element("li", {}, "across: tokens read · dashed: 95 %"));
  const head = ["policy", "weight kept", "layers with 95 %", "visits", "of dense"].map((text) => element("th", { scope: "col" }, text));
  const rows = Object.values(curves).flat().map((point) => {
    const cells = [percent(point.mass), `${point.layers_enough} of ${data.shape.layers}`, whole(point.visits), percent(point.visits / dense)];
    return element("tr", {}, element("th", { scope: "row" }, point.options), ...cells.map((text) => element("td", { class: "number" }, text)));
  });
  byId("cover-table").replaceChildren(element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows));
  advise(recommended, quality, measure, dense);
}

function coverageDrawing(curves, width) {
  const [height, left, bottom] = [260, 46, 26];
  const tokens = Object.values(curves).flat().map((point) => point.tokens);
  const [low, high] = [Math.log2(Math.min(16, ...tokens)), Math.log2(Math.max(32, ...tokens))];
  const x = (count) => left + ((width - left - 24) * (Math.log2(count) - low)) / (high - low);
  const y = (mass) => height - bottom - (height - bottom - 12) * mass;
  const label = "Curves of the weight kept by tokens read; the table below has all points";
  const drawing = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const mass of [0, 0.25, 0.5, 0.75, 1]) {
    drawing.append(shape("path", { class: "grid", d: `M${left} ${y(mass)}H${width}` }));
    drawing.append(shape("text", { x: left - 6, y: y(mass) + 4, "text-anchor": "end" }, percent(mass, 0)));
  }
  for (let power = Math.ceil(low); power <= high; power++)
    drawing.append(shape("text", { x: x(2 ** power), y: height - 8, "text-anchor": "middle" }, whole(2 ** power)));
  drawing.append(shape("path", { class: "grid enough", d: `M${left} ${y(0.95)}H${width}` }));
  for (const [name, points] of Object.entries(curves)) {
    const places = points.map((point) => `${x(point.tokens)} ${y(point.mass)}`);
    if (places.length) drawing.append(shape("path", { class: `line stroke-${name}`, d: `M${places.join("L")}` }));
    for (const point of points) {
      const title = shape("title", {}, `${point.options}: ${percent(point.mass)} of the weight`);
      drawing.append(shape("circle", { class: name, cx: x(point.tokens), cy: y(point.mass), r: 4 }, title));
    }
  }
  return drawing;
}

function advise(recommended, quality, measure, dense) {
  if (!recommended) {
    say(byId("advice"), ["Stay with full attention: "], "nothing smaller saves visits here and keeps 95 % of the weight, or was measured to lose little.");
    return;
  }
  const { options, mass, layers_enough: layers, visits } = recommended;
  const known = quality
    ? `Measured loss on this model: mean KLD ${quality.mean_kld.toFixed(4)}` + (quality.needle_recall === null ? "." : `, ${percent(quality.needle_recall, 0)} of planted facts found.`)
    : "Weight is not quality: measure the loss with ";
  say(
    byId("advice"),
    ["Worth a try: "],
    element("code", {}, options),
    ` keeps ${percent(mass)} of the weight (95 % in ${layers} of ${data.shape.layers} layers) and makes ${human(visits)} visits instead of ${human(dense)}, ${percent(1 - visits / dense)} less. `,
    known,
    ...(quality ? [] : [element("code", {}, measure)]),
  );
}

// ---- token by token

function showRibbon() {
  const { text, surprisal, visits } = data.tokens;
  const queryAt = new Map(data.queries.at.map((at, i) => [at, i]));
  const most = { surprisal: 12, visits: Math.max(1, ...visits) };
  const ribbon = byId("ribbon");
  const spans = text.map((piece, i) => {
    const hasBreak = piece.includes("\n");
    const span = element("span", { "data-i": i, ...(i >= data.prompt_tokens ? { class: "answer" } : {}) });
    span.append(hasBreak ? visible(piece).replaceAll("↵", "↵\n") : visible(piece));
    return span;
  });
  ribbon.append(...spans);
  choices("colours", [["surprisal", "surprisal"], ["visits", "visits"]], (name) => {
    const values = name === "surprisal" ? surprisal : visits;
    spans.forEach((span, i) => span.style.setProperty("--heat", Math.round(50 * Math.min(1, (values[i] || 0) / most[name]))));
  });
  let marked = [];
  const first = Math.min(text.length - 1, data.prompt_tokens);
  cursor(ribbon, {
    columns: spans.length,
    at: [first, 0],
    label: "The text, token by token. Arrow keys move from token to token.",
    find: (event) => (event.target.dataset?.i ? [Number(event.target.dataset.i), 0] : null),
    move: (i) => {
      for (const span of marked) span.classList.remove("now", "source");
      marked = [spans[i]];
      spans[i].classList.add("now");
      const query = queryAt.get(i);
      for (const [at, share] of query === undefined ? [] : data.queries.sources[query]) {
        spans[at].classList.add("source");
        spans[at].style.setProperty("--share", Math.min(85, Math.round(600 * share)));
        marked.push(spans[at]);
      }
      if (ribbon === document.activeElement) bringIntoView(ribbon, spans[i]);
      sayToken(i, query);
    },
  });
  bringIntoView(ribbon, spans[first]);
}

function bringIntoView(box, inside) {
  const [outer, inner] = [box.getBoundingClientRect(), inside.getBoundingClientRect()];
  if (inner.top < outer.top) box.scrollTop -= outer.top - inner.top + 24;
  else if (inner.bottom > outer.bottom) box.scrollTop += inner.bottom - outer.bottom + 24;
}

function sayToken(i, query) {
  const { text, surprisal, visits } = data.tokens;
  const bits = surprisal[i];
  const facts = [
    bits === null ? "nothing before it to expect it from" : `${bits.toFixed(2)} bits of surprise (probability ${percent(2 ** -bits)})`,
    visits[i] ? `${whole(visits[i])} visits to read it` : i < receipt.cached_tokens ? "from a shared prefix, no visits" : "not read by the model, no visits",
  ];
  const lines = [element("span", {}, element("b", {}, `Token ${whole(i)} ${quoted(text[i])}: `), facts.join(" · ")), element("br")];
  if (query === undefined) lines.push("Its attention was not sampled.");
  else {
    const sources = data.queries.sources[query].map(([at, share]) => `${quoted(text[at])} ${percent(share)}`);
    const expected = data.queries.predicted[query].map(([word, share]) => `${quoted(word)} ${percent(share)}`);
    lines.push("Looked at: ", sources.join(", ") || "nothing else", `; first four tokens ${percent(data.queries.sinks[query])}.`, element("br"));
    lines.push("Expected next: ", expected.join(", "), ".");
  }
  byId("token-said").replaceChildren(...lines);
}

// ---- logit lens

function showLens() {
  const { at, rows } = data.lens;
  const corner = element("th", { scope: "col" }, "layer");
  const head = at.map((i) => element("th", { scope: "col", title: `token ${i}` }, visible(data.tokens.text[i])));
  const body = rows.map((row, layer) => {
    const cells = row.map(([word, share]) => {
      const cell = element("td", { title: `${visible(word)} ${percent(share)}` }, visible(word));
      cell.style.setProperty("--heat", Math.round(100 * share));
      return cell;
    });
    return element("tr", {}, element("th", { scope: "row" }, String(layer)), ...cells);
  });
  byId("lens").replaceChildren(element("thead", {}, element("tr", {}, corner, ...head)), element("tbody", {}, ...body));
}

showHead();
showSum();
showSteps();
showHeads();
showPages();
showCoverage();
showRibbon();
showLens();
