// A graph by scope: each scope is laid out by itself, when it is opened, from boxes for its own
// nodes and for the scopes in it. No layout ever has more than MOST boxes: what is longer is split
// into stretches that open like scopes.

const MOST = 120;
const HEAD = 26;
const CHARACTER = 7.25;

class ScopeBox {
  constructor(name, path, parent) {
    Object.assign(this, {
      name,
      path,
      parent,
      items: [],
      inner: new Map(),
      edges: new Map(),
      open: false,
      size: 0,
      layout: null,
    });
  }

  get label() {
    return this.path === "" ? "graph" : this.name;
  }

  /** Forget the layouts that depend on this one. */
  touch() {
    for (let scope = this; scope; scope = scope.parent) scope.layout = null;
  }
}

/** A parameter or buffer of a module: an input that belongs to a scope. */
const isParameter = (node) =>
  Boolean(node.scope) &&
  (node.op === "placeholder" || node.op === "get_attr") &&
  node.users.length > 0;

/** The tree of scopes of a graph, with its modules' parameters or without; nodes know their parents. */
function buildScopes(all, withParameters) {
  for (const node of all)
    Object.assign(node, { parent: null, alone: "", hidden: !withParameters && isParameter(node) });
  const nodes = all.filter((node) => !node.hidden);
  const root = new ScopeBox("", "", null);
  root.open = true;
  for (const node of nodes) {
    let scope = root;
    if (node.scope) {
      for (const name of node.scope.split(".")) {
        let next = scope.inner.get(name);
        if (!next) {
          next = new ScopeBox(name, scope.path ? `${scope.path}.${name}` : name, scope);
          scope.inner.set(name, next);
          scope.items.push(next);
        }
        scope = next;
      }
    }
    scope.items.push(node);
    node.parent = scope;
  }
  shorten(root);
  split(root);
  measure(root);
  for (const node of nodes) {
    for (const input of node.inputs) if (!all[input].hidden) connect(all[input], node);
  }
  openFirst(root);
  return root;
}

/**
 * A scope that holds nothing but one other scope becomes one with it: `blocks.0`. One that holds a
 * single node is that node, which says so: a module that is one call needs no box around it.
 */
function shorten(scope) {
  for (const [n, item] of scope.items.entries()) {
    if (!(item instanceof ScopeBox)) continue;
    let last = item;
    while (last.items.length === 1 && last.items[0] instanceof ScopeBox) last = last.items[0];
    const [only] = last.items;
    if (last.items.length === 1) {
      only.alone = scope.path ? last.path.slice(scope.path.length + 1) : last.path;
      only.parent = scope;
      scope.items[n] = only;
      continue;
    }
    if (last !== item) {
      last.name = scope.path ? last.path.slice(scope.path.length + 1) : last.path;
      last.parent = scope;
      scope.items[n] = last;
    }
    shorten(last);
  }
}

function split(scope) {
  while (scope.items.length > MOST) {
    const size = Math.max(20, Math.ceil(scope.items.length / MOST));
    const parts = [];
    for (let n = 0; n < scope.items.length; n += size) {
      const items = scope.items.slice(n, n + size);
      const part = new ScopeBox(
        `${n + 1}–${n + items.length}`,
        `${scope.path}#${n}+${size}`,
        scope,
      );
      part.items = items;
      for (const item of items) item.parent = part;
      parts.push(part);
    }
    scope.items = parts;
  }
  for (const item of scope.items) if (item instanceof ScopeBox) split(item);
}

function measure(scope) {
  scope.size = 0;
  for (const item of scope.items) scope.size += item instanceof ScopeBox ? measure(item) : 1;
  return scope.size;
}

/** The boxes around something, outermost first, and itself. */
function chain(item) {
  const found = [];
  for (let at = item; at; at = at.parent) found.push(at);
  return found.reverse();
}

/** An edge belongs to the innermost scope that holds both ends. */
function connect(from, to) {
  const a = chain(from);
  const b = chain(to);
  let depth = 0;
  while (a[depth + 1] && a[depth + 1] === b[depth + 1]) depth += 1;
  const [left, right] = [a[depth + 1], b[depth + 1]];
  if (!left || !right) return; // a node that is its own input
  const { edges } = a[depth];
  if (!edges.has(left)) edges.set(left, new Set());
  edges.get(left).add(right);
}

/** Open scopes level by level while the drawing stays small. */
function openFirst(root) {
  let shown = root.items.length;
  let level = root.items;
  while (level.length) {
    const scopes = level.filter((item) => item instanceof ScopeBox);
    const more = scopes.reduce((sum, scope) => sum + scope.items.length, 0);
    if (!scopes.length || (shown + more > 30 && shown > 3)) return;
    for (const scope of scopes) scope.open = true;
    shown += more;
    level = scopes.flatMap((scope) => scope.items);
  }
}

/** `linear` for `torch.nn.functional.linear`; paths to values stay whole. */
function shortTarget(target) {
  return /^[\w.]+$/.test(target) ? target.slice(target.lastIndexOf(".") + 1) : target;
}

const clip = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

/** What a box says: two lines. */
function boxTexts(item) {
  if (item instanceof ScopeBox)
    return [`${item.open ? "▾" : "▸"} ${clip(item.label, 40)}`, plural(item.size, "node")];
  const module = item.alone ? `${item.alone}: ` : "";
  return [clip(visible(item.name), 28), clip(visible(module + shortTarget(item.target)), 30)];
}

function boxSize(item) {
  if (item instanceof ScopeBox && item.open) {
    const { width, height } = layoutScope(item);
    const head = boxTexts(item).join("  ").length * CHARACTER + 20;
    return { width: Math.max(width, head), height: height + HEAD };
  }
  const longest = Math.max(...boxTexts(item).map((text) => text.length));
  return { width: Math.max(60, longest * CHARACTER + 18), height: 40 };
}

/** {width, height, boxes: [{item, x, y, width, height}], edges: [{from, to, points}]}. */
function layoutScope(scope) {
  if (scope.layout) return scope.layout;
  const graph = new dagre.graphlib.Graph();
  graph.setGraph({ rankdir: "TB", nodesep: 16, ranksep: 26, edgesep: 8, marginx: 12, marginy: 12 });
  graph.setDefaultEdgeLabel(() => ({}));
  const numbers = new Map(scope.items.map((item, n) => [item, String(n)]));
  for (const [item, key] of numbers) graph.setNode(key, boxSize(item));
  for (const [from, targets] of scope.edges) {
    for (const to of targets) graph.setEdge(numbers.get(from), numbers.get(to));
  }
  dagre.layout(graph);
  const boxes = scope.items.map((item, n) => {
    const { x, y, width, height } = graph.node(String(n));
    return { item, x: x - width / 2, y: y - height / 2, width, height };
  });
  const edges = graph.edges().map((edge) => ({
    from: scope.items[Number(edge.v)],
    to: scope.items[Number(edge.w)],
    points: graph.edge(edge).points,
  }));
  const { width, height } = graph.graph();
  scope.layout = { width, height, boxes, edges };
  return scope.layout;
}
