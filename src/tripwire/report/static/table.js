// Tables that sort, filter, and show a page of rows at a time.

const PAGE = 100;

/** A column of figures: what is sorted, and how it is shown. */
const figureColumn = (label, value, format = formatCount) => ({
  label,
  number: true,
  value,
  show: (r) => format(value(r), r),
});

const unattributedColumn = figureColumn(
  "Unattributed",
  (r) => r.unattributed_us,
  (us, r) => formatShare(us, r.duration_us),
);

/**
 * columns: [{label, value(row) → what is sorted and searched, show(row) → content, number, start}]
 * options: {caption, sort: column number, descending, filter: whether there is a filter box, id}
 */
function table(
  columns,
  rows,
  { caption, sort = null, descending = false, filter = rows.length > 12, none } = {},
) {
  if (!rows.length) return empty(none || "Nothing here.");
  const state = { sort, descending, words: "", shown: PAGE };
  const body = h("tbody");
  const heads = columns.map((column, number) =>
    h(
      "th",
      { scope: "col", class: column.number ? "number" : null },
      column.value
        ? h("button", { type: "button", on: { click: () => order(number) } }, column.label)
        : column.label,
    ),
  );
  const status = h("span", { class: "muted small", "aria-live": "polite" });
  const more = h("div", { class: "more-rows" });

  function order(number) {
    state.descending = state.sort === number ? !state.descending : Boolean(columns[number].number);
    state.sort = number;
    draw();
  }

  function texts(row) {
    return columns
      .map((column) => (column.value ? (column.value(row) ?? "") : ""))
      .join("\n")
      .toLowerCase();
  }

  function draw() {
    let found = rows;
    if (state.words)
      found = rows.filter((row) =>
        state.words.split(/\s+/).every((word) => texts(row).includes(word)),
      );
    if (state.sort !== null) {
      const key = columns[state.sort].value;
      const sign = state.descending ? -1 : 1;
      found = [...found].sort((a, b) => sign * compareValues(key(a), key(b)));
    }
    heads.forEach((head, number) => {
      if (state.sort === number)
        head.setAttribute("aria-sort", state.descending ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    body.replaceChildren(
      ...found.slice(0, state.shown).map((row) =>
        h(
          "tr",
          null,
          columns.map((column) =>
            h(
              "td",
              { class: column.number ? "number" : null },
              column.show ? column.show(row) : (column.value(row) ?? "–"),
            ),
          ),
        ),
      ),
    );
    status.textContent = state.words
      ? `${formatCount(found.length)} of ${formatCount(rows.length)}`
      : "";
    more.replaceChildren();
    if (found.length > state.shown) {
      more.append(
        h(
          "button",
          {
            type: "button",
            on: {
              click: () => {
                state.shown += 5 * PAGE;
                draw();
              },
            },
          },
          `Show more: ${formatCount(state.shown)} of ${formatCount(found.length)} are shown`,
        ),
      );
    }
  }

  const tools =
    filter &&
    h(
      "div",
      { class: "table-tools" },
      h("input", {
        type: "search",
        placeholder: "Filter",
        "aria-label": `Filter ${caption || "the table"}`,
        on: {
          input: (event) => {
            state.words = event.target.value.trim().toLowerCase();
            state.shown = PAGE;
            draw();
          },
        },
      }),
      status,
    );
  draw();
  return h(
    "div",
    { class: "table" },
    tools,
    h(
      "div",
      { class: "table-box" },
      h(
        "table",
        null,
        caption ? h("caption", null, h("span", { class: "hidden" }, caption)) : null,
        h("thead", null, h("tr", null, heads)),
        body,
      ),
    ),
    more,
  );
}

function compareValues(a, b) {
  if (a === b) return 0;
  if (a === null || a === undefined) return -1;
  if (b === null || b === undefined) return 1;
  return typeof a === "number" && typeof b === "number"
    ? a - b
    : String(a).localeCompare(String(b), "en", { numeric: true });
}

/** A figure with a bar below that compares it with the largest. */
const withBar = (text, value, largest) => [
  text,
  h("span", {
    class: "bar",
    style: { width: `${largest ? Math.max(1, (100 * value) / largest) : 0}%` },
    "aria-hidden": "true",
  }),
];
