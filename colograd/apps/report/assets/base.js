// Elements, numbers and texts. Whatever a model or a run wrote becomes a text node: nothing here parses markup.

function el(tag, attributes = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  const found = document.createElement(name || "div");
  if (classes.length) found.className = classes.join(" ");
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) found.addEventListener(key.slice(2), value);
    else if (key in found && key !== "list") found[key] = value;
    else found.setAttribute(key, value === true ? "" : value);
  }
  add(found, ...children);
  return found;
}

function add(parent, ...children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    parent.append(child instanceof Node ? child : visible(String(child)));
  }
  return parent;
}

// Characters that steer what is shown instead of being shown: controls, and what turns the direction of writing.
const STEERING = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;
const visible = (text) => text.replace(STEERING, (c) => `⟨${c.charCodeAt(0).toString(16).padStart(4, "0")}⟩`);
const short = (text, most) => (text.length > most ? text.slice(0, most) + "…" : text);

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function fmt(value, digits = 3) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e15 || (size < 1e-3 && size > 0)) return value.toExponential(Math.max(digits - 2, 1));
  if (size >= 10000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  if (Number.isInteger(value)) return String(value);
  return String(Number(value.toPrecision(size >= 1000 ? 4 : digits)));
}

const percent = (share) => (isNumber(share) ? `${fmt(100 * share, 3)} %` : "–");

// A metric's unit, by its name; shares, whose unit is %, are shown a hundredfold.
const UNITS = [
  ["s", /^time\/|(^|[/_])seconds$|^step_time$|runtime$/],
  ["GiB", /^memory\//],
  ["tokens", /tokens$|^(eval_.*)?completions\/.*_length$/],
  ["nats", /^(eval_.*)?(entropy|kl)$|logp_difference\//],
  ["%", /_share$|_frequency$|pass@\d+$|^mfu$|^(eval_.*)?(clip_ratio\/|completions\/(clipped_ratio|duplicates)$|frac_)/],
];
const unitOf = (name) => (UNITS.find(([, pattern]) => pattern.test(name)) || [""])[0];
const measured = (value, unit, digits) => (!isNumber(value) ? "–" : unit === "%" ? percent(value) : unit ? `${fmt(value, digits)} ${unit}` : fmt(value, digits));

function duration(seconds) {
  if (!isNumber(seconds) || seconds < 0) return "–";
  if (seconds < 100) return `${fmt(seconds, 3)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 100) return `${minutes} min`;
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

const plural = (count, word) => `${fmt(count)} ${word}${count === 1 ? "" : "s"}`;

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const RUN_COLOURS = 8;
const runColour = (index) => css(`--run-${index % RUN_COLOURS}`);
const SERIES_COLOURS = 14;
const seriesColour = (index) => css(`--series-${index % SERIES_COLOURS}`);

// A canvas as sharp as the screen, drawn again whenever its width changes. draw(context, width, height).
function canvas(height, label, draw) {
  const found = el("canvas", { role: "img", "aria-label": label });
  const box = el("div.canvas", {}, found);
  box.style.height = `${height}px`;
  box.redraw = () => {
    const width = box.clientWidth;
    if (!width) return;
    const scale = window.devicePixelRatio || 1;
    found.width = Math.round(width * scale);
    found.height = Math.round(height * scale);
    const context = found.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    draw(context, width, height);
  };
  watchWidth(box, box.redraw);
  return box;
}

const widths = new ResizeObserver((entries) => {
  for (const entry of entries) {
    const width = Math.round(entry.contentRect.width);
    if (width && width !== entry.target.knownWidth) {
      entry.target.knownWidth = width;
      entry.target.resized();
    }
  }
});

function watchWidth(box, resized) {
  box.resized = resized;
  widths.observe(box);
}

// Help is said by a pointer that rests, and by a click, a tap or Enter until the next one.
function helpButton(help) {
  const found = el("button.help", { title: help, "aria-label": `Help: ${help}`, onclick: () => {
    const shown = tip.of === found, { left, bottom } = found.getBoundingClientRect();
    tip(shown ? null : { clientX: left - 14, clientY: bottom - 10 }, help);
    tip.of = shown ? null : found;
  } }, "?"); // prettier-ignore
  return found;
}

document.addEventListener("click", (event) => tip.of && !event.target.closest(".help") && tip(null));
document.addEventListener("keydown", (event) => tip.of && event.key === "Escape" && tip(null));

// A card with a heading; help is said beside it.
function card(title, help, ...children) {
  return el(
    "section.card",
    {},
    el("div.card-head", {}, el("h3", {}, title), help && helpButton(help)),
    children,
  );
}

function tip(event, ...children) {
  const box = document.getElementById("tip");
  tip.of = null;
  if (!event) {
    box.hidden = true;
    return;
  }
  box.replaceChildren();
  add(box, ...children);
  box.hidden = false;
  box.style.left = "0"; // its width doesn't depend on where it was
  const left = Math.min(event.clientX + 14, window.innerWidth - box.offsetWidth - 8);
  const below = event.clientY + 16 + box.offsetHeight < window.innerHeight;
  box.style.left = `${Math.max(left, 4)}px`;
  box.style.top = `${below ? event.clientY + 16 : event.clientY - box.offsetHeight - 10}px`;
}

function table(head, rows, attributes = {}) {
  return el(
    "div.scroll",
    {},
    el(
      "table",
      attributes,
      head.some((cell) => cell !== "") && el("thead", {}, el("tr", {}, head.map((cell) => (cell instanceof Node ? cell : el("th", { scope: "col" }, cell))))),
      el("tbody", {}, rows.map((row) => (row instanceof Node ? row : el("tr", {}, row.map((cell) => (cell instanceof Node && cell.tagName === "TD" ? cell : el("td", {}, cell))))))),
    ),
  );
}

function select(label, options, value, changed) {
  const found = el("select", { "aria-label": label, onchange: () => changed(found.value) }, options.map(([key, text]) => el("option", { value: key }, text)));
  found.value = value;
  return found;
}
