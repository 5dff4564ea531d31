// The list of compiles, and the page of one: phases, graph, nodes, guards, wires, reads, figures.

function compilesTable(compiles, options) {
  const longest = d3.max(compiles, (one) => one.duration_us) || 1;
  return table(
    [
      {
        label: "Id",
        value: (r) => r.id,
        show: (r) => h("a", { href: `#/compile/${r.number}` }, h("code", null, r.id)),
      },
      {
        label: "Function",
        value: (r) => `${r.function} ${r.file}`,
        show: (r) => [
          h("a", { href: `#/compile/${r.number}` }, h("code", null, r.function)),
          " ",
          placeText(r.file, r.line),
        ],
      },
      report.processes.length > 1 && { label: "Process", value: (r) => processName(r.process) },
      {
        label: "Outcome",
        value: (r) => `${r.status}${r.retired ? " retired" : ""}`,
        show: (r) => [tag(r.status), r.retired ? [" ", tag("retired")] : null],
      },
      figureColumn("Began", (r) => r.start_ns, formatNs),
      figureColumn("Took", (r) => r.duration_us, (us) => withBar(formatUs(us), us, longest)),
      unattributedColumn,
      figureColumn("Nodes", (r) => r.nodes),
      figureColumn("Guards", (r) => r.guards),
      figureColumn("Wires", (r) => r.wires),
    ].filter(Boolean),
    compiles,
    { caption: "Compiles", none: "Nothing was compiled.", ...options },
  );
}

function compilesPage() {
  return [
    h("h1", null, "Compiles"),
    h(
      "p",
      { class: "muted" },
      "One row for each compile: a graph, its guards and wires, or the reason why there is none.",
    ),
    report.skipped.compiles > 0 &&
      notice(`${plural(report.skipped.compiles, "compile")} more are in the sums only.`),
    compilesTable(report.compiles, { filter: true }),
  ];
}

/** A bar of phases, and the same as a table. */
function phaseBar(phases, whole) {
  const sum = Math.max(
    whole || 0,
    phases.reduce((all, [, us]) => all + us, 0),
    1,
  );
  const fillOf = (name) =>
    name === "unattributed" ? {} : { background: `var(${colourName(name)})` };
  const classOf = (name) => (name === "unattributed" ? "hatched" : "");
  return h(
    "div",
    null,
    h(
      "div",
      { class: "stack", "aria-hidden": "true" },
      phases.map(([name, us]) => {
        const share = us / sum;
        return h(
          "span",
          {
            class: `${classOf(name)}${share < 0.03 ? " thin" : ""}`,
            style: { ...fillOf(name), flex: `${share} 1 0` },
            title: `${phaseLabel(name)}: ${formatUs(us)}`,
          },
          share > 0.06 ? phaseLabel(name) : "",
        );
      }),
    ),
    h(
      "div",
      { class: "phase-table" },
      table(
        [
          {
            label: "Phase",
            value: (r) => r[0],
            show: (r) => [
              h("span", { class: `swatch ${classOf(r[0])}`, style: fillOf(r[0]) }),
              phaseLabel(r[0]),
            ],
          },
          figureColumn("Time", (r) => r[1], formatUs),
          figureColumn("Share", (r) => r[1], (us) => formatShare(us, sum)),
        ],
        phases,
        { caption: "Phases", filter: false, none: "No phase was measured." },
      ),
    ),
  );
}

const TABS = [
  ["graph", "Graph"],
  ["nodes", "Nodes"],
  ["guards", "Guards"],
  ["wires", "Wires"],
  ["reads", "Reads"],
  ["phases", "Phases"],
  ["figures", "All figures"],
];

function compilePage(number, wantedTab, wantedNode) {
  const compile = report.compiles[number];
  if (!compile)
    return [
      h("h1", null, "No such compile"),
      h("p", null, h("a", { href: "#/compiles" }, "All compiles")),
    ];
  const detail = findDetail(number);
  const retirements = report.retirements.rows.filter((group) =>
    group.occurrences.some((one) => one.compile === number),
  );
  const recompiles = report.recompiles.rows.filter((group) =>
    group.occurrences.some((one) => one.compile === number),
  );
  const siblings = report.compiles.filter(
    (one) =>
      one.function === compile.function &&
      one.file === compile.file &&
      one.process === compile.process,
  );
  const at = siblings.indexOf(compile);
  return [
    h("h1", null, h("code", null, compile.function)),
    h(
      "p",
      { class: "muted" },
      placeText(compile.file, compile.line),
      ` · compile ${compile.id} · ${report.processes[compile.process].label}`,
      compile.backend && ` · back end ${compile.backend}`,
      " · ",
      tag(compile.status),
      compile.retired ? [" ", tag("retired")] : null,
    ),
    siblings.length > 1 &&
      h(
        "p",
        { class: "small" },
        `${at + 1} of ${siblings.length} compiles of this function. `,
        at > 0 && h("a", { href: `#/compile/${siblings[at - 1].number}` }, "← earlier"),
        " ",
        at < siblings.length - 1 &&
          h("a", { href: `#/compile/${siblings[at + 1].number}` }, "later →"),
      ),
    compile.reason && notice(compile.reason),
    recompiles.map((group) => notice(h("b", null, "Compiled again because: "), group.reason)),
    retirements.map((group) => {
      const one = group.occurrences.find((o) => o.compile === number);
      return notice(
        h("b", null, "Retired: "),
        h("code", null, group.title),
        " was ",
        h("code", null, one.before || "?"),
        " and became ",
        h("code", null, one.after || "?"),
        ", written at ",
        placeText(group.place.file, group.place.line, group.place.func),
        excerpt(group.place.excerpt),
      );
    }),
    h(
      "div",
      { class: "figures" },
      figure(formatUs(compile.duration_us), "compile time"),
      figure(formatShare(compile.unattributed_us, compile.duration_us), "unattributed"),
      figure(formatCount(compile.nodes), "nodes"),
      figure(formatCount(compile.guards), "guards"),
      figure(formatCount(compile.wires), "wires"),
      figure(formatCount(compile.reads), "reads"),
      figure(formatCount(compile.retired), "retirements"),
    ),
    tabs(number, compile, detail, wantedTab, wantedNode),
  ];
}

function tabs(number, compile, detail, wantedTab, wantedNode) {
  const none = compile.has_detail
    ? "The log has none for this compile."
    : report.skipped.details
      ? "Left out: the report keeps the details of the slowest compiles only."
      : "The log has no details of this compile.";
  const rows = (part, caption) => () =>
    detail[part]
      ? [
          seenTable(detail[part].rows, caption),
          detail[part].left_out > 0 &&
            notice(`${formatCount(detail[part].left_out)} more were left out.`),
        ]
      : empty(none);
  const draw = {
    graph: () => (detail.graph ? graphView(number, detail, wantedNode) : empty(none)),
    nodes: () => (detail.graph ? nodeTable(number, detail) : empty(none)),
    guards: () =>
      detail.guards ? h("pre", { class: "source", tabindex: "0" }, detail.guards) : empty(none),
    wires: rows("wires", "Wires"),
    reads: rows("reads", "Reads"),
    phases: () => [
      compileTimeline(number, compile),
      phaseBar(sumPhases([compile]), compile.duration_us),
    ],
    figures: () => (detail.metrics ? metricsTable(detail.metrics) : empty(none)),
  };
  const panel = h("div", { role: "tabpanel", id: "panel", tabindex: "-1" });
  const first = wantedTab && draw[wantedTab] ? wantedTab : detail.graph ? "graph" : "phases";
  const buttons = TABS.map(([name, label]) =>
    h(
      "button",
      {
        role: "tab",
        type: "button",
        id: `tab-${name}`,
        "aria-controls": "panel",
        on: {
          click: () => {
            open(name);
            history.replaceState(null, "", `#/compile/${number}/${name}`);
          },
          keydown: onKey,
        },
      },
      label,
    ),
  );

  function open(name) {
    for (const button of buttons) {
      const chosen = button.id === `tab-${name}`;
      button.setAttribute("aria-selected", String(chosen));
      button.tabIndex = chosen ? 0 : -1;
    }
    panel.setAttribute("aria-labelledby", `tab-${name}`);
    panel.replaceChildren();
    append(panel, [draw[name]()]);
  }

  function onKey(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = buttons[(buttons.indexOf(event.target) + step + buttons.length) % buttons.length];
    next.focus();
    next.click();
  }

  open(first);
  return [
    h("div", { class: "tabs", role: "tablist", "aria-label": "Parts of the compile" }, buttons),
    panel,
  ];
}

/** The spans of one compile, or nothing where the report kept none. */
function compileTimeline(number, compile) {
  const lanes = report.lanes
    .map((lane) => ({
      ...lane,
      spans: lane.spans.filter((one) => one.compile === number),
      marks: lane.marks.filter(
        (one) => one.compile === number && one.time <= compile.start_ns + compile.duration_us * 1e3,
      ),
    }))
    .filter((lane) => lane.spans.length);
  if (!lanes.length) return null;
  const from = d3.min(lanes, (lane) => d3.min(lane.spans, (one) => one.start));
  const to = d3.max(lanes, (lane) => d3.max(lane.spans, (one) => one.start + one.duration));
  return [timeline(lanes, [from, Math.max(to, from + 1)]).element, h("h2", null, "Phases")];
}

function seenTable(rows, caption) {
  return table(
    [
      { label: "Source", value: (r) => r.source, show: (r) => h("code", null, r.source) },
      { label: "Seen", value: (r) => r.seen, show: (r) => h("code", null, r.seen) },
      {
        label: "Line",
        value: (r) => `${r.file}:${String(r.line).padStart(7, "0")} ${r.text}`,
        show: (r) => [placeText(r.file, r.line), r.text && h("code", { class: "said" }, r.text)],
      },
    ],
    rows,
    { caption, filter: true },
  );
}

function metricsTable(metrics) {
  const text = (value) =>
    Array.isArray(value)
      ? value.join("\n")
      : typeof value === "object"
        ? JSON.stringify(value)
        : String(value);
  return table(
    [
      { label: "Figure", value: (r) => r[0], show: (r) => h("code", null, r[0]) },
      {
        label: "Value",
        value: (r) => r[1],
        show: (r) =>
          r[0].endsWith("_us") &&
          !r[0].includes("time_us_") &&
          typeof r[1] === "number" &&
          !/^(start|end)_time/.test(r[0])
            ? formatUs(r[1])
            : typeof r[1] === "number"
              ? formatCount(r[1])
              : h("pre", null, text(r[1])),
      },
    ],
    Object.entries(metrics),
    { caption: "All figures", filter: true },
  );
}
