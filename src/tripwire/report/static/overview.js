// The overview: the figures that people ask for first, each with a way to what is behind it.

function figure(value, label, href, more) {
  const inside = [h("b", null, value), h("span", null, label), more && h("span", null, more)];
  return href ? h("a", { class: "figure", href }, inside) : h("div", { class: "figure" }, inside);
}

function overviewPage() {
  const compiles = total("compiles");
  const duration = total("duration_us");
  const rest = total("unattributed_us");
  const count = (status) => report.compiles.filter((one) => one.status === status).length;
  const bad = [
    [count("failed"), "failed"],
    [count("refused"), "refused"],
    [count("unfinished"), "unfinished"],
  ]
    .filter(([n]) => n)
    .map(([n, word]) => `${n} ${word}`)
    .join(", ");
  const hits = sumCounter("frames", "hit");
  const misses = sumCounter("frames", "miss");
  const gained = sumCounter("frames", "saved_us");
  const lost = sumCounter("frames", "lost_us");
  const saved = gained === null && lost === null ? null : (gained ?? 0) - (lost ?? 0);
  const slowest = [...report.compiles].sort((a, b) => b.duration_us - a.duration_us).slice(0, 6);
  return [
    h("h1", null, report.title),
    h(
      "p",
      { class: "muted" },
      report.begin_ms
        ? `${new Date(report.begin_ms).toISOString().replace("T", " ").slice(0, 19)} UTC · `
        : "",
      `${formatNs(report.duration_ns)} · ${plural(report.processes.length, "process", "processes")} · ${plural(report.skipped.events, "event")}`,
    ),
    skippedNotice(),
    h(
      "div",
      { class: "figures" },
      figure(formatCount(compiles), "compiles", "#/compiles", bad),
      figure(
        formatUs(duration),
        "compile time",
        "#/timeline",
        `${formatShare(duration * 1e3, report.duration_ns * report.processes.length)} of the run`,
      ),
      figure(
        formatUs(rest),
        "unattributed",
        null,
        `${formatShare(rest, duration)} of compile time`,
      ),
      figure(
        hits === null ? "–" : formatCount(hits),
        "hits",
        "#/processes",
        hits === null ? "not counted" : `${formatShare(hits, hits + (misses || 0))} of calls`,
      ),
      figure(
        saved === null ? "–" : formatUs(saved),
        "saved by hits",
        "#/processes",
        saved === null ? "too few hits were timed" : "at least, estimated",
      ),
      figure(
        formatCount(report.retirements.total),
        "retirements",
        "#/retirements",
        plural(report.retirements.rows.length, "cause"),
      ),
      figure(
        formatCount(report.refusals.total),
        "refusals",
        "#/refusals",
        plural(report.refusals.rows.length, "reason"),
      ),
      figure(formatCount(report.recompiles.total), "recompiles", "#/recompiles"),
      figure(formatCount(total("records")), "records", "#/records"),
    ),
    h(
      "div",
      { class: "columns" },
      h(
        "section",
        null,
        h("h2", null, "Where compile time went"),
        phaseBar(sumPhases(report.processes), duration),
      ),
      h(
        "section",
        null,
        h("h2", null, "Slowest compiles"),
        compactCompiles(slowest),
        h("p", null, h("a", { href: "#/compiles" }, "All compiles")),
      ),
    ),
    h("h2", null, "Who retires code"),
    retirementsTable(report.retirements.rows.slice(0, 5), { filter: false }),
    h("h2", null, "What is refused"),
    refusalsTable(report.refusals.rows.slice(0, 5), { filter: false }),
    h("h2", null, "Processes"),
    processTable(),
  ];
}

function compactCompiles(compiles) {
  const longest = d3.max(compiles, (one) => one.duration_us) || 1;
  return table(
    [
      {
        label: "Function",
        value: (r) => r.function,
        show: (r) => [
          h("a", { href: `#/compile/${r.number}` }, h("code", null, r.function)),
          " ",
          h(
            "span",
            { class: "muted small" },
            r.id,
            report.processes.length > 1 ? ` · ${processName(r.process)}` : "",
          ),
        ],
      },
      {
        label: "Outcome",
        value: (r) => r.status,
        show: (r) => [tag(r.status), r.retired ? [" ", tag("retired")] : null],
      },
      figureColumn("Nodes", (r) => r.nodes),
      figureColumn("Took", (r) => r.duration_us, (us) => withBar(formatUs(us), us, longest)),
    ],
    compiles,
    { caption: "Slowest compiles", filter: false, none: "Nothing was compiled." },
  );
}

/** What reading skipped, and what was left out; nothing where all is here. */
function skippedNotice() {
  const {
    damaged,
    newer,
    headless,
    processes,
    counters,
    lanes,
    marks,
    compiles,
    details: missing,
    span_names: names,
  } = report.skipped;
  const parts = [
    [damaged, "damaged line was skipped", "damaged lines were skipped"],
    [newer, "line of a later version was skipped", "lines of a later version were skipped"],
    [headless, "file has lost its header", "files have lost their headers"],
    [processes, "process was left out", "processes were left out"],
    [counters, "set of counters was left out", "sets of counters were left out"],
    [lanes, "thread has no lane", "threads have no lane"],
    [marks, "moment isn't in the timeline", "moments aren't in the timeline"],
    [compiles, "compile is in the sums only", "compiles are in the sums only"],
    [missing, "compile is without its details", "compiles are without their details"],
    [names, "span had a name beyond the limit", "spans had names beyond the limit"],
  ]
    .filter(([count]) => count > 0)
    .map(([count, one, many]) => plural(count, one, many));
  return parts.length > 0 && notice(`${parts.join("; ")}.`);
}
