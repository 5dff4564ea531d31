// Retirements, refusals and recompiles: what happened alike is one row, with its latest times.

function byProcess(group) {
  const entries = Object.entries(group.by_process);
  return entries
    .map(([number, count]) => `${processName(number)}: ${formatCount(count)}`)
    .join(", ");
}

function occurrences(group, withValues) {
  return h(
    "details",
    null,
    h(
      "summary",
      null,
      group.count > group.occurrences.length
        ? `${group.occurrences.length} of ${formatCount(group.count)}`
        : plural(group.occurrences.length, "time"),
    ),
    table(
      [
        figureColumn("At", (r) => r.time, formatNs),
        {
          label: "Compile",
          value: (r) => report.compiles[r.compile]?.id,
          show: (r) => compileLink(r.compile),
        },
        withValues && {
          label: "Old",
          value: (r) => r.before,
          show: (r) => h("code", null, r.before || "–"),
        },
        withValues && {
          label: "New",
          value: (r) => r.after,
          show: (r) => h("code", null, r.after || "–"),
        },
        !withValues &&
          group.occurrences.some((one) => one.after) && { label: "Said", value: (r) => r.after },
        report.processes.length > 1 && { label: "Process", value: (r) => processName(r.process) },
      ].filter(Boolean),
      group.occurrences,
      { caption: "Occurrences", filter: false },
    ),
  );
}

const leftOut = (groups) =>
  groups.left_out > 0 &&
  notice(
    `There were too many different ones: ${formatCount(groups.left_out)} of ${formatCount(groups.total)} are counted but not listed.`,
  );

const processColumn = () =>
  report.processes.length > 1 && { label: "Processes", value: (r) => byProcess(r) };

const countColumn = figureColumn("Count", (r) => r.count);

const placeColumn = (label) => ({
  label,
  value: (r) =>
    `${r.place.file}:${String(r.place.line).padStart(7, "0")} ${r.place.func} ${r.place.excerpt}`,
  show: (r) => [placeText(r.place.file, r.place.line, r.place.func), excerpt(r.place.excerpt)],
});

function change(group) {
  const last = group.occurrences[group.occurrences.length - 1];
  return [h("code", null, last.before || "?"), " → ", h("code", null, last.after || "?")];
}

function retirementsTable(rows, options) {
  return table(
    [
      countColumn,
      {
        label: "What was written",
        value: (r) => r.title,
        show: (r) => [h("code", null, r.title), h("div", { class: "small" }, change(r))],
      },
      placeColumn("Written at"),
      processColumn(),
      { label: "When", show: (r) => occurrences(r, true) },
    ].filter(Boolean),
    rows,
    { caption: "Retirements", sort: 0, descending: true, none: "Nothing was retired.", ...options },
  );
}

function retirementsPage() {
  return [
    h("h1", null, "Retirements"),
    h(
      "p",
      { class: "muted" },
      "An entry is retired when something that it had read is written. Grouped by what was written and by the line that wrote it.",
    ),
    leftOut(report.retirements),
    retirementsTable(report.retirements.rows),
  ];
}

function refusalsTable(rows, options) {
  return table(
    [
      countColumn,
      {
        label: "Why",
        value: (r) => `${r.title} ${r.reason}`,
        show: (r) => [tag(r.title, "refused"), h("div", null, r.reason)],
      },
      placeColumn("At"),
      processColumn(),
      { label: "When", show: (r) => occurrences(r, false) },
    ].filter(Boolean),
    rows,
    { caption: "Refusals", sort: 0, descending: true, none: "Nothing was refused.", ...options },
  );
}

function refusalsPage() {
  const slugs = new Map();
  for (const group of report.refusals.rows)
    slugs.set(group.title, (slugs.get(group.title) || 0) + group.count);
  return [
    h("h1", null, "Refusals"),
    h(
      "p",
      { class: "muted" },
      "A call that could not become a graph ran as plain Python. docs/messages.md explains each reason.",
    ),
    slugs.size > 1 &&
      h(
        "p",
        null,
        [...slugs]
          .sort((a, b) => b[1] - a[1])
          .slice(0, 30)
          .map(([slug, count]) => [tag(`${slug} ${formatCount(count)}`, "refused"), " "]),
      ),
    leftOut(report.refusals),
    refusalsTable(report.refusals.rows),
  ];
}

function recompilesPage() {
  return [
    h("h1", null, "Recompiles"),
    h(
      "p",
      { class: "muted" },
      "Calls that no compiled entry accepted, and why each entry rejected them.",
    ),
    leftOut(report.recompiles),
    table(
      [
        countColumn,
        {
          label: "Function",
          value: (r) => `${r.title} ${r.place.file}`,
          show: (r) => [
            h("code", null, r.title),
            h("div", null, placeText(r.place.file, r.place.line)),
          ],
        },
        {
          label: "Why no entry fitted",
          value: (r) => r.reason,
          show: (r) => r.reason.split("\n").map((line) => h("div", null, line)),
        },
        processColumn(),
        { label: "When", show: (r) => occurrences(r, false) },
      ].filter(Boolean),
      report.recompiles.rows,
      { caption: "Recompiles", sort: 0, descending: true, none: "Nothing was compiled again." },
    ),
  ];
}

function recordsPage() {
  return [
    h("h1", null, "Records"),
    h(
      "p",
      { class: "muted" },
      "Calls that failed and were kept in files. ",
      h("code", null, "tripwire show FILE"),
      " looks into one, ",
      h("code", null, "tripwire replay FILE --trust"),
      " runs it again.",
    ),
    report.skipped.records > 0 &&
      notice(`${plural(report.skipped.records, "more record")} are not listed.`),
    table(
      [
        {
          label: "Function",
          value: (r) => r.function,
          show: (r) => h("code", null, r.function || "–"),
        },
        { label: "Raised", value: (r) => r.exception },
        { label: "File", value: (r) => r.path, show: (r) => h("code", null, r.path) },
        figureColumn("At", (r) => r.time_ns, formatNs),
        { label: "Process", value: (r) => processName(r.process) },
      ],
      report.records,
      { caption: "Records", none: "No record was written." },
    ),
  ];
}
