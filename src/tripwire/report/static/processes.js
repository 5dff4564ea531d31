// Processes side by side: the same figure of each in one line, what stands out marked.

function processTable() {
  const largest = d3.max(report.processes, (one) => one.duration_us);
  return table(
    [
      { label: "Process", value: (r) => r.label },
      figureColumn("Compiles", (r) => r.compiles),
      figureColumn("Compile time", (r) => r.duration_us, (us) => withBar(formatUs(us), us, largest)),
      unattributedColumn,
      figureColumn("Retirements", (r) => r.retirements),
      figureColumn("Refusals", (r) => r.refusals),
      figureColumn("Recompiles", (r) => r.recompiles),
      figureColumn("Records", (r) => r.records),
      figureColumn("Events", (r) => r.events),
    ],
    report.processes,
    { caption: "Processes" },
  );
}

const MANY = 16; // processes that fit beside each other

function processesPage() {
  const rows = sideRows();
  return [
    h("h1", null, report.processes.length > 1 ? "Processes side by side" : "Process"),
    h(
      "p",
      { class: "muted" },
      "Spread is the largest figure divided by the smallest. Sort by it to see what differs most between ranks.",
    ),
    report.processes.length > MANY
      ? notice(
          `The first ${MANY} of ${report.processes.length} processes stand beside each other; the table at the end has all.`,
        )
      : null,
    table(
      [
        {
          label: "Figure",
          value: (r) => r.name,
          show: (r) => (r.code ? h("code", null, r.name) : r.name),
        },
        { label: "Part", value: (r) => r.part },
        ...report.processes.slice(0, MANY).map((process, n) => ({
          label: processName(n),
          number: true,
          value: (r) => r.values[n],
          show: (r) =>
            r.values[n] === undefined
              ? "–"
              : withBar(r.format(r.values[n]), r.values[n], r.largest),
        })),
        report.processes.length > 1 && {
          label: "Spread",
          number: true,
          value: (r) => r.spread,
          show: (r) =>
            r.spread === Infinity
              ? "only some"
              : r.spread > 1.005
                ? `${r.spread.toFixed(2)}×`
                : "=",
        },
      ].filter(Boolean),
      rows,
      { caption: "Figures by process", filter: true },
    ),
    h("h2", null, "Who they are"),
    table(
      [
        { label: "Process", value: (r) => r.label },
        {
          label: "Parent",
          number: true,
          value: (r) => r.parent_pid,
          show: (r) => String(r.parent_pid),
        },
        { label: "Python", value: (r) => r.python },
        { label: "torch", value: (r) => r.torch },
        { label: "tripwire", value: (r) => r.tripwire },
        figureColumn("Began", (r) => r.start_ns, formatNs),
        figureColumn("Lasted", (r) => r.end_ns - r.start_ns, formatNs),
        {
          label: "Command",
          value: (r) => r.argv.join(" "),
          show: (r) => h("code", null, r.argv.join(" ")),
        },
      ],
      report.processes,
      { caption: "Who they are" },
    ),
    report.processes.length > MANY && [h("h2", null, "All processes"), processTable()],
  ];
}

function sideRows() {
  const rows = [];
  const shown = report.processes;
  function add(part, name, values, format, code = false) {
    const known = values.filter((value) => value !== undefined);
    const largest = d3.max(known) ?? 0;
    const smallest = known.length < values.length ? 0 : d3.min(known);
    const spread = smallest > 0 ? largest / smallest : largest > 0 ? Infinity : 1;
    rows.push({ part, name, values, format, code, largest, spread });
  }
  for (const [field, name] of [
    ["compiles", "compiles"],
    ["retirements", "retirements"],
    ["refusals", "refusals"],
    ["recompiles", "recompiles"],
    ["records", "records"],
  ]) {
    add(
      "sums",
      name,
      shown.map((process) => process[field]),
      formatCount,
    );
  }
  add(
    "sums",
    "compile time",
    shown.map((process) => process.duration_us),
    formatUs,
  );
  for (const [phase] of sumPhases(shown)) {
    add(
      "phases",
      phaseLabel(phase),
      shown.map((process) =>
        phase === "unattributed" ? process.unattributed_us : process.phases[phase],
      ),
      formatUs,
    );
  }
  const functions = new Map();
  for (const compile of report.compiles) {
    if (!functions.has(compile.function))
      functions.set(
        compile.function,
        shown.map(() => undefined),
      );
    const values = functions.get(compile.function);
    values[compile.process] = (values[compile.process] || 0) + compile.duration_us;
  }
  for (const [name, values] of functions) add("compile time of", name, values, formatUs, true);
  const counters = new Map();
  shown.forEach((process, n) => {
    for (const [group, names] of Object.entries(process.counters)) {
      for (const [name, count] of Object.entries(names)) {
        const key = `${group}.${name}`;
        if (!counters.has(key))
          counters.set(
            key,
            shown.map(() => undefined),
          );
        counters.get(key)[n] = count;
      }
    }
  });
  for (const [name, values] of counters) add("counters", name, values, formatCount, true);
  return rows;
}
