// The timeline: threads as lanes under their processes, spans nested as they ran, one time axis.
// Lanes are canvases: tens of thousands of spans stay smooth, and the table below is for those who
// read rather than look.

const ROW = 17;
const MARK_SHAPES = { retirement: "◆", refusal: "▲", recompile: "●", record: "■", instant: "│" };
const MARK_ROWS = { retirement: 0, record: 0 }; // the others stand below: causes above effects
const MARK_COLOURS = {
  retirement: "--warn",
  refusal: "--bad",
  recompile: "--accent",
  record: "--bad",
  instant: "--muted",
};

function timelinePage() {
  const lanes = report.lanes;
  if (!lanes.length) return [h("h1", null, "Timeline"), empty("The log has no spans.")];
  const left = lanes.reduce((sum, lane) => sum + lane.total - lane.spans.length, 0);
  const view = timeline(lanes, [0, Math.max(1, report.duration_ns)]);
  const spans = lanes.flatMap((lane) => lane.spans.map((one) => ({ ...one, lane })));
  spans.sort((a, b) => b.duration - a.duration);
  return [
    h("h1", null, "Timeline"),
    h(
      "p",
      { class: "muted" },
      "Drag to move, Ctrl + wheel to zoom, double-click a span to fill the width with it. Keys: ← → move, + − zoom, 0 shows all. ",
      Object.entries(MARK_SHAPES).map(([kind, shape]) => [
        h("span", { style: { color: `var(${MARK_COLOURS[kind]})` } }, shape),
        ` ${kind}  `,
      ]),
    ),
    left > 0 &&
      notice(
        `Each lane keeps its longest spans: ${plural(left, "shorter span was", "shorter spans were")} left out.`,
      ),
    view.element,
    h("h2", null, "Longest spans"),
    spanTable(spans.slice(0, 1000), view),
    h("h2", null, "Spans by name"),
    spanTotals(report.spans),
  ];
}

function spanTable(spans, view) {
  return table(
    [
      {
        label: "Span",
        value: (r) => r.name,
        show: (r) =>
          h("button", { class: "link", type: "button", on: { click: () => view.show(r) } }, r.name),
      },
      figureColumn("Took", (r) => r.duration, formatNs),
      figureColumn("Began", (r) => r.start, formatNs),
      { label: "Lane", value: (r) => `${processName(r.lane.process)} · ${r.lane.name}` },
      {
        label: "Compile",
        value: (r) => report.compiles[r.compile]?.id,
        show: (r) => compileLink(r.compile),
      },
      {
        label: "Raised",
        value: (r) => r.error,
        show: (r) => (r.error ? tag(r.error, "failed") : ""),
      },
    ],
    spans,
    { caption: "Longest spans", sort: 1, descending: true },
  );
}

function spanTotals(totals) {
  const largest = d3.max(totals, (one) => one.total_ns) || 1;
  return table(
    [
      {
        label: "Name",
        value: (r) => r.name,
        show: (r) => [
          h("span", { class: "swatch", style: { background: `var(${colourName(r.name)})` } }),
          h("code", null, r.name),
        ],
      },
      figureColumn("Calls", (r) => r.calls),
      figureColumn("Total", (r) => r.total_ns, (ns) => withBar(formatNs(ns), ns, largest)),
      figureColumn("Mean", (r) => r.total_ns / r.calls, formatNs),
      figureColumn("Longest", (r) => r.longest_ns, formatNs),
      figureColumn("Raised", (r) => r.errors),
    ],
    totals,
    { caption: "Spans by name", sort: 2, descending: true },
  );
}

/** {element, show(span)}: lanes over a stretch of time, `[from, to]` in nanoseconds. */
function timeline(lanes, [from, to]) {
  const axis = h("canvas", { height: 24, "aria-hidden": "true" });
  const drawn = lanes.map((lane) => ({
    lane,
    rows: (d3.max(lane.spans, (one) => one.depth) ?? -1) + 1 + (lane.marks.length ? 2 : 0),
    canvas: h("canvas", {
      role: "img",
      "aria-label": `${lane.name}: ${plural(lane.spans.length, "span")}, ${plural(lane.marks.length, "moment")}`,
    }),
  }));
  const element = h(
    "div",
    {
      class: "timeline",
      tabindex: "0",
      role: "group",
      "aria-label": "Timeline. Arrow keys move, plus and minus zoom, 0 shows all.",
      on: { keydown: onKey },
    },
    h("div", { class: "lane axis" }, h("span", { class: "label" }), axis),
  );
  let process = null;
  for (const { lane, canvas } of drawn) {
    if (lane.process !== process) {
      process = lane.process;
      element.append(h("div", { class: "process" }, report.processes[process].label));
    }
    element.append(
      h(
        "div",
        { class: "lane" },
        h("span", { class: "label", title: lane.name }, lane.name),
        canvas,
      ),
    );
  }

  const base = d3.scaleLinear().domain([from, to]);
  let scale = base;
  let colours = {};
  let frame = 0;
  const zoom = d3
    .zoom()
    .scaleExtent([1, 1e6])
    .filter((event) =>
      event.type === "wheel"
        ? event.ctrlKey || event.metaKey
        : !event.button && event.type !== "dblclick",
    )
    .on("zoom", ({ transform }) => {
      scale = transform.rescaleX(base);
      plan();
    });
  const selection = d3.select(element).call(zoom).on("dblclick.zoom", null);

  function resize() {
    const width = axis.clientWidth;
    if (!width) return;
    base.range([0, width]);
    zoom
      .extent([
        [0, 0],
        [width, 1],
      ])
      .translateExtent([
        [0, 0],
        [width, 1],
      ]);
    colours = readColours();
    for (const one of [{ canvas: axis, rows: 24 / ROW }, ...drawn]) {
      const height = Math.round(one.rows * ROW) + (one.canvas === axis ? 0 : 5);
      one.canvas.width = width * devicePixelRatio;
      one.canvas.height = height * devicePixelRatio;
      one.canvas.style.setProperty("height", `${height}px`);
    }
    scale = d3.zoomTransform(element).rescaleX(base);
    plan();
  }

  function plan() {
    if (!frame)
      frame = requestAnimationFrame(() => {
        frame = 0;
        drawAxis();
        drawn.forEach(drawLane);
      });
  }

  function start(canvas) {
    const context = canvas.getContext("2d");
    context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    return context;
  }

  function drawAxis() {
    const context = start(axis);
    context.fillStyle = colours["--muted"];
    context.strokeStyle = colours["--line"];
    const ticks = scale.ticks(Math.max(2, axis.clientWidth / 110));
    const format = tickFormat(scale.domain()[1], ticks.length > 1 ? ticks[1] - ticks[0] : 1);
    for (const tick of ticks) {
      const x = Math.round(scale(tick)) + 0.5;
      context.beginPath();
      context.moveTo(x, 16);
      context.lineTo(x, 24);
      context.stroke();
      context.fillText(format(tick), x + 3, 11);
    }
  }

  function drawLane({ lane, canvas, rows }) {
    const box = canvas.getBoundingClientRect();
    if (box.bottom < -200 || box.top > innerHeight + 200) return;
    const context = start(canvas);
    const width = canvas.clientWidth;
    const lastPixel = [];
    for (const one of lane.spans) {
      const x0 = scale(one.start);
      const x1 = scale(one.start + one.duration);
      if (x1 < 0 || x0 > width) continue;
      const pixel = Math.round(x1);
      if (x1 - x0 < 0.7 && lastPixel[one.depth] === pixel) continue;
      lastPixel[one.depth] = pixel;
      const left = Math.max(x0, -2);
      const wide = Math.max(0.8, Math.min(x1, width + 2) - left);
      const y = one.depth * ROW + 3;
      context.fillStyle = colours[colourName(one.name)];
      context.fillRect(left, y, Math.max(0.8, wide - 0.5), ROW - 2);
      if (one.error) {
        context.fillStyle = colours["--bad"];
        context.fillRect(left, y + ROW - 4, wide, 2);
      }
      if (wide > 26) {
        context.fillStyle = colours["--on-fill"];
        context.fillText(
          fitText(context, visible(one.name), wide - 8),
          Math.max(left, 0) + 4,
          y + ROW / 2 - 0.5,
        );
      }
    }
    for (const one of lane.marks) {
      const x = scale(one.time);
      if (x < -5 || x > width + 5) continue;
      context.fillStyle = colours[MARK_COLOURS[one.kind]] || colours["--muted"];
      context.fillText(
        MARK_SHAPES[one.kind] || "│",
        x - 5,
        (rows - 2 + (MARK_ROWS[one.kind] ?? 1)) * ROW + ROW / 2 + 2,
      );
    }
  }

  /** The span or moment under the pointer. */
  function find({ lane, rows }, event, canvas) {
    const box = canvas.getBoundingClientRect();
    const x = event.clientX - box.left;
    const row = Math.floor((event.clientY - box.top - 3) / ROW);
    if (lane.marks.length && row >= rows - 2) {
      const near = lane.marks.filter(
        (one) => Math.abs(scale(one.time) - x) < 7 && row === rows - 2 + (MARK_ROWS[one.kind] ?? 1),
      );
      return near.length ? { marks: near } : null;
    }
    const time = scale.invert(x);
    const slack = scale.invert(x + 1.5) - time;
    const hits = lane.spans.filter(
      (one) =>
        one.depth === row && one.start - slack <= time && time <= one.start + one.duration + slack,
    );
    return hits.length ? { span: hits.reduce((a, b) => (a.duration > b.duration ? a : b)) } : null;
  }

  function describe(found) {
    if (found.marks)
      return found.marks
        .slice(0, 8)
        .map((one) => `${one.kind}: ${one.text}  at ${formatNs(one.time)}`)
        .join("\n");
    const { name, duration, start: began, compile, error } = found.span;
    const id = report.compiles[compile];
    return [
      name,
      `${formatNs(duration)}, from ${formatNs(began)}`,
      id && `compile ${id.id}: ${id.function}`,
      error && `raised ${error}`,
    ]
      .filter(Boolean)
      .join("\n");
  }

  for (const one of drawn) {
    one.canvas.addEventListener("pointermove", (event) => {
      const found = event.buttons ? null : find(one, event, one.canvas);
      tip(found ? describe(found) : "", event);
    });
    one.canvas.addEventListener("pointerleave", (event) => tip("", event));
    one.canvas.addEventListener("dblclick", (event) => {
      const found = find(one, event, one.canvas);
      if (found?.span) show(found.span);
      else if (found?.marks[0].compile >= 0) location.hash = `#/compile/${found.marks[0].compile}`;
    });
  }

  /** Fill the width with a span, and a little around it. */
  function show({ start: began, duration }) {
    const width = axis.clientWidth;
    const length = Math.max(duration, 10) * 1.1;
    const k = Math.min(1e6, Math.max(1, (to - from) / length));
    const x = -k * base(began - (length - duration) / 2);
    selection.call(
      zoom.transform,
      d3.zoomIdentity.translate(Math.min(0, Math.max(x, width * (1 - k))), 0).scale(k),
    );
    element.scrollIntoView({ block: "nearest" });
  }

  function onKey(event) {
    const step = axis.clientWidth / 6 / d3.zoomTransform(element).k;
    const actions = {
      ArrowLeft: () => zoom.translateBy(selection, step, 0),
      ArrowRight: () => zoom.translateBy(selection, -step, 0),
      "+": () => zoom.scaleBy(selection, 1.6),
      "=": () => zoom.scaleBy(selection, 1.6),
      "-": () => zoom.scaleBy(selection, 1 / 1.6),
      0: () => selection.call(zoom.transform, d3.zoomIdentity),
    };
    if (!actions[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    actions[event.key]();
  }

  new ResizeObserver(resize).observe(element);
  const onScroll = () => (element.isConnected ? plan() : removeEventListener("scroll", onScroll));
  addEventListener("scroll", onScroll, { passive: true });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", resize);
  return { element, show };
}

/** Labels of an axis: one unit, and as many digits as tell two ticks apart. */
function tickFormat(largest, step) {
  const [scale, unit] =
    largest < 1e3
      ? [1, "ns"]
      : largest < 1e6
        ? [1e3, "µs"]
        : largest < 1e9
          ? [1e6, "ms"]
          : [1e9, "s"];
  const digits = Math.max(0, Math.min(9, Math.ceil(-Math.log10(step / scale) - 1e-9)));
  return (tick) => `${(tick / scale).toFixed(digits)}${THIN}${unit}`;
}

function readColours() {
  const style = getComputedStyle(document.documentElement);
  const names = [
    ...PHASE_NAMES.map((name) => `--p-${name}`),
    "--p-other",
    "--on-fill",
    "--muted",
    "--line",
    "--bad",
    "--warn",
    "--accent",
  ];
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(name).trim()]));
}

function fitText(context, text, width) {
  const most = Math.floor(width / 5.2);
  if (text.length <= most && context.measureText(text).width <= width) return text;
  let short = text.slice(0, most);
  while (short && context.measureText(`${short}…`).width > width) short = short.slice(0, -1);
  return short ? `${short}…` : "";
}
