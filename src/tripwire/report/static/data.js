// The data, as tripwire/report/model.py lays it out. Rows that are arrays get names here.

const parse = (id) => JSON.parse(document.getElementById(id)?.textContent ?? "null");

const report = parse("report");

const span = ([start, duration, depth, name, compile, error]) => ({
  start,
  duration,
  depth,
  name: report.span_names[name],
  compile,
  error,
});
const mark = ([time, kind, text, compile]) => ({ time, kind, text, compile });
const occurrence = ([time, process, compile, before, after]) => ({
  time,
  process,
  compile,
  before,
  after,
});
const place = ([file, line, func, text, excerpt]) => ({ file, line, func, text, excerpt });
const seen = ([source, seen, file, line, text]) => ({ source, seen, file, line, text });

const nodeChange = ([kind, scope, name, target, what, file, line, text]) => ({
  kind,
  scope,
  name,
  target,
  what,
  file,
  line,
  text,
});

report.compiles.forEach((compile, number) => {
  compile.number = number;
});
for (const lane of report.lanes) {
  lane.spans = lane.spans.map(span);
  lane.marks = lane.marks.map(mark);
}
for (const groups of [report.retirements, report.refusals, report.recompiles]) {
  for (const group of groups.rows) {
    group.place = place(group.place);
    group.occurrences = group.occurrences.map(occurrence);
  }
}

for (const graph of report.diff?.graphs ?? []) graph.nodes = graph.nodes.map(nodeChange);

const details = new Map();

/** The graph, guards, wires, reads and metrics of a compile, read when they are first asked for. */
function findDetail(number) {
  if (!details.has(number)) details.set(number, readDetail(number));
  return details.get(number);
}

function readDetail(number) {
  const detail = report.compiles[number].has_detail ? parse(`detail-${number}`) : null;
  if (!detail) return { graph: null, guards: "", wires: null, reads: null, metrics: null };
  const { graph, guards, wires, reads, metrics } = detail; // each in stretches
  return {
    graph: graph ? joinGraph(graph) : null,
    guards: (guards ?? []).join(""),
    wires: wires ? joinRows(wires) : null,
    reads: reads ? joinRows(reads) : null,
    metrics: metrics ? metrics[0] : null,
  };
}

const sumLeftOut = (stretches) => stretches.reduce((sum, stretch) => sum + stretch.left_out, 0);

function joinRows(stretches) {
  const rows = stretches.flatMap((stretch) => stretch.rows.map(seen));
  return { rows, left_out: sumLeftOut(stretches) };
}

/** One graph of its stretches; inputs become numbers of nodes. */
function joinGraph(stretches) {
  const nodes = [];
  const numbers = new Map();
  for (const stretch of stretches) {
    const places = stretch.places.map(place);
    for (const [name, op, target, inputs, scope, where, shape] of stretch.nodes) {
      const index = nodes.length;
      numbers.set(name, index);
      nodes.push({
        index,
        name,
        op,
        target,
        inputs,
        users: [],
        scope: stretch.scopes[scope],
        place: places[where],
        shape,
      });
    }
  }
  for (const node of nodes) {
    node.inputs = node.inputs.map((name) => numbers.get(name)).filter((n) => n !== undefined);
    for (const input of node.inputs) nodes[input].users.push(node.index);
  }
  return { nodes, left_out: sumLeftOut(stretches) };
}

// --- sums ----------------------------------------------------------------------------------------

const total = (field) => report.processes.reduce((sum, process) => sum + process[field], 0);

/** [phase, microseconds] of some compiles or processes, the longest first, the rest at the end. */
function sumPhases(rows) {
  const sums = new Map();
  let rest = 0;
  for (const row of rows) {
    for (const [phase, us] of Object.entries(row.phases))
      sums.set(phase, (sums.get(phase) || 0) + us);
    rest += row.unattributed_us;
  }
  const sorted = [...sums].sort((a, b) => b[1] - a[1]);
  return rest > 0 ? [...sorted, ["unattributed", rest]] : sorted;
}

/** A counter over all processes, or null where nobody counted. */
function sumCounter(group, name) {
  let sum = null;
  for (const { counters } of report.processes) {
    const value =
      Object.hasOwn(counters, group) && Object.hasOwn(counters[group], name)
        ? counters[group][name]
        : null;
    if (value !== null) sum = (sum ?? 0) + value;
  }
  return sum;
}

const processName = (number) => {
  const process = report.processes[number];
  return process.rank === null ? `${process.host}:${process.pid}` : `rank ${process.rank}`;
};

/** A link to a compile's page; its process is named where there are several. */
function compileLink(number, text) {
  const compile = report.compiles[number];
  if (!compile) return h("span", { class: "muted" }, "–");
  const where = report.processes.length > 1 ? ` · ${processName(compile.process)}` : "";
  return h(
    "a",
    { href: `#/compile/${number}` },
    h("code", null, text ?? compile.id),
    text ? null : where,
  );
}
