// Elements are made of other elements and of text. Nothing here, or anywhere else in the report,
// parses a string as HTML: what user code named is shown, never run.

const SVG = "http://www.w3.org/2000/svg";

// Characters that hide, or reorder what stands beside them.
const INVISIBLE =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;

/** A text with its invisible characters written out. */
function visible(text) {
  return String(text).replace(
    INVISIBLE,
    (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"),
  );
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on")
      for (const [event, listener] of Object.entries(value))
        element.addEventListener(event, listener);
    else if (name === "style")
      for (const [key, v] of Object.entries(value)) element.style.setProperty(key, v);
    else element.setAttribute(name, value === true ? "" : visible(value));
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(visible(child)));
  }
}

/** An HTML element: h("a", {href: "#/"}, "text", otherElement). */
const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);

/** The same for SVG. */
const s = (tag, attributes, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

// --- figures -------------------------------------------------------------------------------------

const THIN = "\u202f";

function formatCount(value) {
  return value === null || value === undefined ? "–" : Number(value).toLocaleString("en-US");
}

/** A duration, with three digits that matter. */
function formatNs(ns) {
  if (ns === null || ns === undefined) return "–";
  const size = Math.abs(ns);
  if (size < 1e3) return `${Math.round(ns)}${THIN}ns`;
  const [scale, unit] = size < 1e6 ? [1e3, "µs"] : size < 1e9 ? [1e6, "ms"] : [1e9, "s"];
  const value = ns / scale;
  const digits = Math.abs(value) < 10 ? 2 : Math.abs(value) < 100 ? 1 : 0;
  return `${value.toFixed(digits)}${THIN}${unit}`;
}

const formatUs = (us) => formatNs(us === null || us === undefined ? us : us * 1e3);

function formatShare(part, whole) {
  if (!whole) return "–";
  const share = (100 * part) / whole;
  return `${share < 10 ? share.toFixed(1) : Math.round(share)}${THIN}%`;
}

const plural = (count, word, many = `${word}s`) =>
  `${formatCount(count)} ${count === 1 ? word : many}`;

// --- what many pages show ------------------------------------------------------------------------

const baseName = (path) => path.slice(path.lastIndexOf("/") + 1);

/** `train.py:41 in step`, with the whole path as its title. */
function placeText(file, line, func) {
  if (!file && !func) return h("span", { class: "muted" }, "–");
  return h(
    "span",
    { class: "place", title: file ? `${file}:${line}` : null },
    file ? h("b", null, `${baseName(file)}:${line}`) : null,
    file && func ? " in " : null,
    func || null,
  );
}

/** Source with the lines of carets set off; nothing where the log has no source. */
function excerpt(text) {
  if (!text) return null;
  let lines = text.replace(/\n+$/, "").split("\n");
  const indent = Math.min(
    ...lines.filter((line) => line.trim()).map((line) => line.length - line.trimStart().length),
  );
  if (Number.isFinite(indent)) lines = lines.map((line) => line.slice(indent));
  return h(
    "pre",
    { class: "excerpt" },
    lines.map((line, n) => [
      n ? "\n" : null,
      /^[\s~^]*[~^]+[\s~^]*$/.test(line) ? h("span", { class: "carets" }, line) : line,
    ]),
  );
}

const tag = (text, kind = text) =>
  h(
    "span",
    {
      class: `tag ${String(kind)
        .replace(/[^\w-]+/g, "-")
        .slice(0, 40)}`,
    },
    text,
  );

const empty = (text) => h("p", { class: "empty" }, text);

const notice = (...children) => h("div", { class: "notice", role: "note" }, ...children);

/** The colour of a phase or span. */
const PHASE_NAMES = [
  "trace",
  "observe",
  "plan",
  "arm",
  "backend",
  "first_run",
  "retire",
  "record",
];

function colourName(name) {
  const phase = name.replace(/_us$/, "").replace(/ /g, "_");
  if (PHASE_NAMES.includes(phase)) return `--p-${phase}`;
  if (phase.startsWith("compile")) return "--p-other";
  let sum = 0;
  for (const c of name.slice(0, 200)) sum = (sum * 31 + c.codePointAt(0)) >>> 0;
  return `--p-${PHASE_NAMES[sum % PHASE_NAMES.length]}`;
}

const phaseLabel = (name) => name.replace(/_us$/, "").replace(/_/g, " ");

/** Shows the tooltip by the pointer; an empty text hides it. */
function tip(text, event) {
  const box = document.getElementById("tip");
  box.hidden = !text;
  if (!text) return;
  box.textContent = visible(text.replace(/\n/g, "\u0000")).replace(/\\u0000/g, "\n");
  const right = event.clientX + box.offsetWidth + 20 > innerWidth;
  box.style.setProperty(
    "left",
    `${Math.max(4, right ? event.clientX - box.offsetWidth - 12 : event.clientX + 14)}px`,
  );
  box.style.setProperty(
    "top",
    `${Math.min(event.clientY + 14, innerHeight - box.offsetHeight - 6)}px`,
  );
}
