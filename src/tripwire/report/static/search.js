// Search over everything: names, lines, causes, reasons, nodes, guards, wires, reads.

const MOST_FOUND = 40; // shown of each kind

function searchPage(words) {
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  if (!wanted.length)
    return [
      h("h1", null, "Search"),
      empty("Type into the box at the top; every word has to be there."),
    ];
  const kinds = new Map();
  let sum = 0;
  function look(kind, texts, make) {
    const whole = texts.filter(Boolean).join("\n");
    const lower = whole.toLowerCase();
    if (!wanted.every((word) => lower.includes(word))) return;
    sum += 1;
    if (!kinds.has(kind)) kinds.set(kind, { count: 0, rows: [] });
    const found = kinds.get(kind);
    found.count += 1;
    if (found.rows.length < MOST_FOUND)
      found.rows.push(
        make(texts.filter(Boolean).map((text) => highlight(around(text, wanted), wanted))),
      );
  }
  for (const compile of report.compiles) {
    look(
      "Compiles",
      [compile.function, compile.id, compile.file, compile.reason, compile.status, compile.backend],
      (texts) => [`#/compile/${compile.number}`, texts],
    );
  }
  for (const [kind, groups, href] of [
    ["Retirements", report.retirements, "#/retirements"],
    ["Refusals", report.refusals, "#/refusals"],
    ["Recompiles", report.recompiles, "#/recompiles"],
  ]) {
    for (const group of groups.rows) {
      const last = group.occurrences[group.occurrences.length - 1];
      look(
        kind,
        [
          group.title,
          group.reason,
          group.place.file && `${group.place.file}:${group.place.line}`,
          group.place.func,
          group.place.excerpt,
          last.before,
          last.after,
        ],
        (texts) => [href, texts],
      );
    }
  }
  for (const record of report.records)
    look("Records", [record.function, record.exception, record.path], (texts) => [
      "#/records",
      texts,
    ]);
  for (const one of report.spans) look("Spans", [one.name], (texts) => ["#/timeline", texts]);
  for (const process of report.processes)
    look("Processes", [process.label, process.argv.join(" ")], (texts) => ["#/processes", texts]);
  for (const compile of report.compiles) {
    const detail = findDetail(compile.number);
    const title = `${compile.function} ${compile.id}`;
    for (const node of detail.graph?.nodes || []) {
      look(
        "Nodes",
        [
          node.name,
          node.target,
          node.scope,
          node.shape,
          node.place.text,
          node.place.file && `${baseName(node.place.file)}:${node.place.line}`,
        ],
        (texts) => [`#/compile/${compile.number}/graph/${node.index}`, texts, title],
      );
    }
    for (const line of (detail.guards || "").split("\n"))
      look("Guards", [line], (texts) => [`#/compile/${compile.number}/guards`, texts, title]);
    for (const [part, kind] of [
      ["wires", "Wires"],
      ["reads", "Reads"],
    ]) {
      for (const row of detail[part]?.rows || [])
        look(
          kind,
          [row.source, row.seen, row.file && `${baseName(row.file)}:${row.line}`],
          (texts) => [`#/compile/${compile.number}/${part}`, texts, title],
        );
    }
  }
  return [
    h("h1", null, "Search: ", h("code", null, words)),
    h("p", { class: "muted", role: "status" }, plural(sum, "result")),
    [...kinds].map(([kind, { count, rows }]) => [
      h("h2", null, `${kind} `, h("span", { class: "muted" }, formatCount(count))),
      h(
        "div",
        { class: "table-box" },
        h(
          "table",
          null,
          h("caption", null, h("span", { class: "hidden" }, kind)),
          h(
            "tbody",
            null,
            rows.map(([href, texts, title]) =>
              h(
                "tr",
                null,
                h(
                  "td",
                  null,
                  h("a", { href }, texts[0]),
                  texts.slice(1).map((text) => [h("span", { class: "muted" }, " · "), text]),
                  title && h("div", { class: "muted small" }, title),
                ),
              ),
            ),
          ),
        ),
      ),
      count > rows.length && h("p", { class: "muted" }, `${formatCount(count - rows.length)} more`),
    ]),
  ];
}

/** The part of a long text that has the first word in it. */
function around(text, wanted) {
  if (text.length < 240) return text;
  const at = Math.max(0, text.toLowerCase().indexOf(wanted[0]) - 80);
  return `${at ? "…" : ""}${text.slice(at, at + 240)}…`;
}

function highlight(text, wanted) {
  const lower = text.toLowerCase();
  const code = h("code");
  let at = 0;
  while (at < text.length) {
    let next = -1;
    let length = 0;
    for (const word of wanted) {
      const found = lower.indexOf(word, at);
      if (found >= 0 && (next < 0 || found < next)) [next, length] = [found, word.length];
    }
    if (next < 0) break;
    append(code, [text.slice(at, next), h("mark", null, text.slice(next, next + length))]);
    at = next + length;
  }
  append(code, [text.slice(at)]);
  return code;
}
