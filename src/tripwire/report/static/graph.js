// The drawing of a graph: scopes open and close, nodes tell of themselves at the side.

const EVERYTHING = 800; // nodes that "open all" still draws

function graphView(number, detail, wanted) {
  const { nodes, left_out } = detail.graph;
  const parameters = nodes.filter(isParameter).length;
  let root = buildScopes(nodes, false);
  const side = h(
    "aside",
    { class: "side", "aria-label": "Selected node", "aria-live": "polite" },
    h(
      "p",
      { class: "muted" },
      "Select a node to see its line, inputs and users. Enter or a click opens and closes a scope.",
    ),
  );
  const drawing = s("g");
  const svg = s(
    "svg",
    { role: "group", "aria-label": `Graph of ${plural(nodes.length, "node")}, drawn by scope` },
    s(
      "defs",
      null,
      s(
        "marker",
        {
          id: "arrow",
          viewBox: "0 0 8 8",
          refX: 7,
          refY: 4,
          markerWidth: 8,
          markerHeight: 8,
          markerUnits: "userSpaceOnUse",
          orient: "auto",
        },
        s("path", { d: "M0,0L8,4L0,8z", class: "arrow" }),
      ),
    ),
    drawing,
  );
  const box = h("div", { class: "graph-box" }, svg);
  let selected = null;

  const zoom = d3
    .zoom()
    .scaleExtent([0.02, 4])
    .on("zoom", ({ transform }) => drawing.setAttribute("transform", transform));
  const selection = d3.select(svg).call(zoom).on("dblclick.zoom", null);
  const line = d3
    .line(
      (p) => p.x,
      (p) => p.y,
    )
    .curve(d3.curveBasis);

  function toggle(scope) {
    scope.open = !scope.open;
    scope.touch();
    draw(scope);
  }

  function draw(focus) {
    const around = new Set(
      selected ? [...selected.inputs, ...selected.users].flatMap((n) => chain(nodes[n])) : [],
    );
    const own = new Set(selected ? chain(selected) : []);
    let toFocus = null;

    function press(act) {
      return {
        click: (event) => {
          event.stopPropagation();
          act();
        },
        keydown: (event) => {
          if (event.key === "Enter" || event.key === " ") {
            event.preventDefault();
            event.stopPropagation();
            act();
          }
        },
      };
    }

    function drawItem({ item, x, y, width, height }) {
      const [first, second] = boxTexts(item);
      const place = { transform: `translate(${x},${y})` };
      const near = around.has(item) && !own.has(item) ? " near" : "";
      let made;
      if (item instanceof ScopeBox) {
        const head = {
          class: "scope-head",
          tabindex: "0",
          role: "button",
          "aria-expanded": String(item.open),
          "aria-label": `scope ${item.path}, ${plural(item.size, "node")}`,
          on: press(() => toggle(item)),
        };
        if (item.open) {
          made = s(
            "g",
            { class: `scope open${near}`, ...place },
            s("rect", { width, height }),
            s(
              "g",
              head,
              s("rect", { x: 1, y: 1, width: width - 2, height: HEAD - 4 }),
              s("text", { x: 9, y: 16 }, `${first}  `, s("tspan", { class: "second" }, second)),
            ),
            s(
              "g",
              { transform: `translate(${(width - item.layout.width) / 2},${HEAD - 6})` },
              drawScope(item),
            ),
          );
          if (focus === item) toFocus = made.querySelector(".scope-head");
        } else {
          made = s(
            "g",
            { ...head, class: `scope scope-head${near}`, ...place },
            s("rect", { width, height }),
            s("text", { x: 9, y: 17 }, first),
            s("text", { x: 9, y: 32, class: "second" }, second),
          );
          if (focus === item) toFocus = made;
        }
        made.setAttribute("data-path", visible(item.path));
        return made;
      }
      const kind = ["placeholder", "output", "get_attr"].includes(item.op) ? item.op : "call";
      made = s(
        "g",
        {
          class: `node ${kind}${item === selected ? " selected" : near}`,
          tabindex: "0",
          role: "button",
          "aria-pressed": String(item === selected),
          "aria-label": `node ${item.name}, ${item.target}`,
          "data-node": item.index,
          on: press(() => select(item)),
          ...place,
        },
        s("rect", { width, height }),
        s("text", { x: 9, y: 17 }, first),
        s("text", { x: 9, y: 32, class: "second" }, second),
      );
      if (focus === item) toFocus = made;
      return made;
    }

    function drawScope(scope) {
      const { boxes, edges } = layoutScope(scope);
      const lit = ({ from, to }) =>
        selected && ((own.has(from) && around.has(to)) || (own.has(to) && around.has(from)));
      return [
        edges.map((edge) =>
          s("path", {
            class: `edge${lit(edge) ? " lit" : ""}`,
            d: line(edge.points),
            "marker-end": "url(#arrow)",
          }),
        ),
        boxes.map(drawItem),
      ];
    }

    drawing.replaceChildren();
    append(drawing, [drawScope(root)]);
    if (toFocus) toFocus.focus({ preventScroll: true });
  }

  /** Draw parameters as nodes, or leave them to the side's lists of inputs. */
  function showParameters(shown) {
    root = buildScopes(nodes, shown);
    checkbox.checked = shown;
    draw();
    fit(0.85);
  }

  function select(node, { move = false } = {}) {
    selected = node;
    if (node.hidden) showParameters(true);
    for (const scope of chain(node).slice(0, -1)) {
      if (!scope.open) {
        scope.open = true;
        scope.touch();
      }
    }
    draw(node);
    describe(node);
    history.replaceState(null, "", `#/compile/${number}/graph/${node.index}`);
    if (move) centre(node);
  }

  function describe(node) {
    const link = (n) =>
      h(
        "li",
        null,
        h(
          "button",
          { class: "link", type: "button", on: { click: () => select(nodes[n], { move: true }) } },
          nodes[n].name,
        ),
        h("span", { class: "muted small" }, ` ${clip(shortTarget(nodes[n].target), 40)}`),
      );
    const list = (title, numbers) =>
      numbers.length > 0 && [
        h("h2", null, title),
        h("ul", { class: "links" }, numbers.slice(0, 60).map(link)),
        numbers.length > 60 && h("p", { class: "muted" }, `and ${numbers.length - 60} more`),
      ];
    const { file, line: at, func, text, excerpt: source } = node.place;
    side.replaceChildren(
      ...[
        h("h3", null, h("code", null, node.name)),
        h(
          "dl",
          null,
          h("dt", null, "kind"),
          h("dd", null, h("code", null, node.op)),
          h("dt", null, "target"),
          h("dd", null, h("code", null, node.target)),
          node.shape && [h("dt", null, "value"), h("dd", null, h("code", null, node.shape))],
          node.scope && [h("dt", null, "scope"), h("dd", null, h("code", null, node.scope))],
          (file || func) && [h("dt", null, "line"), h("dd", null, placeText(file, at, func))],
        ),
        source ? excerpt(source) : text ? h("pre", null, text) : null,
        list("Inputs", [...new Set(node.inputs)]),
        list("Users", [...new Set(node.users)]),
      ]
        .flat(Infinity)
        .filter(Boolean),
    );
  }

  function bounds(element) {
    const inner = element.getBoundingClientRect();
    const outer = svg.getBoundingClientRect();
    const { k, x, y } = d3.zoomTransform(svg);
    return {
      x: (inner.left + inner.width / 2 - outer.left - x) / k,
      y: (inner.top + inner.height / 2 - outer.top - y) / k,
    };
  }

  function centre(node) {
    const element = drawing.querySelector(`[data-node="${node.index}"]`);
    if (!element) return;
    const { x, y } = bounds(element);
    const k = Math.max(0.8, d3.zoomTransform(svg).k);
    selection.call(
      zoom.transform,
      d3.zoomIdentity.translate(svg.clientWidth / 2 - k * x, svg.clientHeight / 2 - k * y).scale(k),
    );
  }

  function fit(least = 0.02) {
    const { width, height } = layoutScope(root);
    const k = Math.max(
      least,
      Math.min(1.1, (svg.clientWidth - 16) / width, (svg.clientHeight - 16) / height),
    );
    selection.call(
      zoom.transform,
      d3.zoomIdentity.translate(Math.max(8, (svg.clientWidth - k * width) / 2), 8).scale(k),
    );
  }

  function setAll(open) {
    const visit = (scope) => {
      scope.layout = null;
      for (const item of scope.items)
        if (item instanceof ScopeBox) {
          item.open = open;
          visit(item);
        }
    };
    visit(root);
    draw();
    fit();
  }

  const button = (label, act, more) =>
    h("button", { type: "button", on: { click: act }, ...more }, label);
  const checkbox = h("input", {
    type: "checkbox",
    on: { change: () => showParameters(checkbox.checked) },
  });
  const many = nodes.length > EVERYTHING;
  const tools = h(
    "div",
    { class: "tools", role: "toolbar", "aria-label": "Graph" },
    button("Fit", () => fit()),
    button("+", () => zoom.scaleBy(selection, 1.4), { "aria-label": "Zoom in" }),
    button("−", () => zoom.scaleBy(selection, 1 / 1.4), { "aria-label": "Zoom out" }),
    button("Close all", () => setAll(false)),
    button("Open all", () => setAll(true), {
      disabled: many,
      title: many ? `Graphs of more than ${EVERYTHING} nodes open scope by scope` : null,
    }),
    parameters > 0 && h("label", null, checkbox, ` Parameters (${formatCount(parameters)})`),
    h("input", {
      type: "search",
      placeholder: "Find a node, then Enter",
      "aria-label": "Find a node",
      on: { keydown: onFind },
    }),
    h(
      "span",
      { class: "muted small" },
      plural(nodes.length, "node"),
      left_out ? `; ${formatCount(left_out)} more were left out` : "",
    ),
  );

  function onFind(event) {
    if (event.key !== "Enter" || !event.target.value) return;
    const words = event.target.value.toLowerCase();
    const matches = nodes.filter((node) =>
      `${node.name}\n${node.target}\n${node.scope}\n${node.place.text}`
        .toLowerCase()
        .includes(words),
    );
    if (!matches.length) return;
    const next = matches.find((node) => selected && node.index > selected.index) || matches[0];
    select(next, { move: true });
    event.target.focus();
  }

  requestAnimationFrame(() => {
    draw();
    fit(0.85);
    if (wanted !== undefined && nodes[wanted]) select(nodes[wanted], { move: true });
  });
  return h("div", null, tools, h("div", { class: "graph-page" }, box, side));
}

function nodeTable(number, detail) {
  return table(
    [
      { label: "#", number: true, value: (r) => r.index },
      {
        label: "Node",
        value: (r) => r.name,
        show: (r) =>
          h("a", { href: `#/compile/${number}/graph/${r.index}` }, h("code", null, r.name)),
      },
      { label: "Target", value: (r) => r.target, show: (r) => h("code", null, r.target) },
      { label: "Value", value: (r) => r.shape, show: (r) => h("code", null, r.shape) },
      { label: "Scope", value: (r) => r.scope, show: (r) => h("code", null, r.scope || "–") },
      {
        label: "Line",
        value: (r) => `${r.place.file}:${String(r.place.line).padStart(7, "0")} ${r.place.func}`,
        show: (r) => placeText(r.place.file, r.place.line, r.place.func),
      },
      { label: "Source", value: (r) => r.place.text, show: (r) => h("code", null, r.place.text) },
    ],
    detail.graph.nodes,
    { caption: "Nodes", filter: true },
  );
}
