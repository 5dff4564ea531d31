// This run against an earlier one.

const WORSE_FIRST = { new: 0, slower: 1, more: 2, gone: 3, faster: 4, fewer: 5, same: 6 };

function ratio(before, after) {
  if (before === null || after === null) return "";
  if (!before) return after ? "from 0" : "=";
  const value = after / before;
  return Math.abs(value - 1) < 0.005 ? "=" : `${value.toFixed(2)}×`;
}

function changeTable(rows, caption, { format = phaseLabel } = {}) {
  const has = (field) =>
    rows.some((row) => row[`${field}_before`] !== null || row[`${field}_after`] !== null);
  const pair = (field, label, show) =>
    has(field)
      ? [
          {
            label: `${label} before`,
            number: true,
            value: (r) => r[`${field}_before`],
            show: (r) => show(r[`${field}_before`]),
          },
          {
            label: `${label} now`,
            number: true,
            value: (r) => r[`${field}_after`],
            show: (r) => show(r[`${field}_after`]),
          },
        ]
      : [];
  const main = (row) => (row.us_before === null && row.us_after === null ? "count" : "us");
  const sides = (row) => [row[`${main(row)}_before`], row[`${main(row)}_after`]];
  return table(
    [
      { label: "Verdict", value: (r) => WORSE_FIRST[r.verdict], show: (r) => tag(r.verdict) },
      {
        label: "What",
        value: (r) => `${r.name} ${r.place}`,
        show: (r) => [
          h("code", null, format(r.name)),
          r.place ? [" ", h("span", { class: "place", title: r.place }, baseName(r.place))] : null,
        ],
      },
      ...pair("us", "Time", formatUs),
      ...pair("count", "Count", formatCount),
      ...pair("nodes", "Nodes", formatCount),
      {
        label: "Ratio",
        number: true,
        value: (r) => (sides(r)[1] ?? 0) / (sides(r)[0] || 1),
        show: (r) => ratio(...sides(r)),
      },
    ],
    rows,
    { caption, none: "Neither run has any." },
  );
}

const same = (name) => name;

/** The nodes of one graph that came, went or changed, by scope. */
function graphChange(graph) {
  const { added, removed, changed } = graph;
  return h(
    "details",
    { class: "graph-change" },
    h(
      "summary",
      null,
      h("code", null, graph.function),
      " ",
      h("span", { class: "place", title: graph.place }, baseName(graph.place)),
      ` · ${graph.id_before} before, `,
      compileLink(graph.compile),
      " now · ",
      [
        [added, "added"],
        [removed, "removed"],
        [changed, "changed"],
      ]
        .filter(([count]) => count)
        .map(([count, word]) => [tag(`${formatCount(count)} ${word}`, word), " "]),
    ),
    table(
      [
        { label: "Change", value: (r) => r.kind, show: (r) => tag(r.kind) },
        {
          label: "Scope",
          value: (r) => r.scope,
          show: (r) => (r.scope ? h("code", null, r.scope) : h("span", { class: "muted" }, "–")),
        },
        { label: "Node", value: (r) => r.name, show: (r) => h("code", null, r.name) },
        { label: "Target", value: (r) => r.target, show: (r) => h("code", null, r.target) },
        { label: "What", value: (r) => r.what, show: (r) => h("code", null, r.what) },
        {
          label: "Line",
          value: (r) => `${r.file}:${String(r.line).padStart(7, "0")} ${r.text}`,
          show: (r) => [placeText(r.file, r.line), r.text && h("code", { class: "said" }, r.text)],
        },
      ],
      graph.nodes,
      { caption: `Nodes of ${graph.function} that differ`, filter: true },
    ),
    graph.left_out > 0 && notice(`${formatCount(graph.left_out)} more were left out.`),
  );
}

function graphChanges({ graphs, same_graphs: equal, graphs_left_out: missing }) {
  if (!graphs.length && !equal && !missing) return empty("No graph is in both runs.");
  return [
    missing > 0 &&
      notice(`Too large to compare: ${plural(missing, "graph")}.`),
    equal > 0 && h("p", { class: "muted" }, `${plural(equal, "graph")} without a change.`),
    graphs.map(graphChange),
  ];
}

function diffPage() {
  const { diff } = report;
  if (!diff)
    return [
      h("h1", null, "Comparison"),
      empty("Make the report with --diff OTHER to compare two runs."),
    ];
  const parts = [
    ["functions", "Compiled functions"],
    ["phases", "Phases"],
    ["retirements", "Retirements"],
    ["refusals", "Refusals"],
    ["recompiles", "Recompiles"],
    ["spans", "Spans"],
    ["counters", "Counters"],
  ];
  const verdicts = new Map();
  for (const [part] of parts)
    for (const row of diff[part]) verdicts.set(row.verdict, (verdicts.get(row.verdict) || 0) + 1);
  return [
    h("h1", null, "Comparison"),
    h(
      "p",
      { class: "muted" },
      "This run, ",
      h("code", null, report.title),
      ", against the earlier one, ",
      h("code", null, diff.other),
      ". Times within 10 % or half a millisecond of each other count as the same; lines may have moved.",
    ),
    diff.rows_left_out > 0 &&
      notice(`Too many to compare: ${plural(diff.rows_left_out, "row")} of both runs.`),
    h(
      "p",
      null,
      [...verdicts]
        .filter(([word]) => word !== "same")
        .sort((a, b) => WORSE_FIRST[a[0]] - WORSE_FIRST[b[0]])
        .map(([word, count]) => [tag(`${count} ${word}`, word), " "]),
    ),
    h("h2", null, "Sums"),
    changeTable(diff.figures, "Sums", { format: same }),
    parts.map(([part, title]) => [
      h("h2", null, title),
      changeTable(diff[part], title, { format: part === "phases" ? phaseLabel : same }),
      part === "functions" && [h("h2", null, "Graphs, node by node"), graphChanges(diff)],
    ]),
  ];
}
