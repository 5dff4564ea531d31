// Routes: the part of the address behind `#` names the page.

const PAGES = [
  ["", "Overview", overviewPage, null],
  ["timeline", "Timeline", timelinePage, null],
  ["compiles", "Compiles", compilesPage, () => report.compiles.length],
  ["retirements", "Retirements", retirementsPage, () => report.retirements.total],
  ["refusals", "Refusals", refusalsPage, () => report.refusals.total],
  ["recompiles", "Recompiles", recompilesPage, () => report.recompiles.total],
  ["records", "Records", recordsPage, () => report.records.length],
  ["processes", "Processes", processesPage, () => report.processes.length],
  ...(report.diff ? [["diff", "Comparison", diffPage, null]] : []),
  ["about", "About", aboutPage, null],
];

function aboutPage() {
  const licences = parse("licences");
  return [
    h("h1", null, "About this report"),
    h(
      "p",
      null,
      "One file, made by tripwire from a directory of logs. It makes no network requests. Texts of your program are shown as they are; invisible characters are spelled out.",
    ),
    h("p", null, "Keys: / goes to the search box; Tab and Enter reach everything else."),
    h("h2", null, "What was read"),
    metricsTable(report.skipped),
    h("h2", null, "Parts made by others"),
    licences.map(([names, text]) =>
      h("details", null, h("summary", null, names), h("pre", null, text)),
    ),
  ];
}

function findPage(hash) {
  const [name, ...rest] = hash.replace(/^#\/?/, "").split("/");
  if (name === "compile")
    return {
      current: "compiles",
      make: () =>
        compilePage(Number(rest[0]), rest[1], rest[2] === undefined ? undefined : Number(rest[2])),
    };
  if (name === "search")
    return { current: null, make: () => searchPage(decodeQuietly(rest.join("/"))) };
  const page = PAGES.find(([path]) => path === name);
  if (!page)
    return {
      current: null,
      make: () => [h("h1", null, "No such page"), h("p", null, h("a", { href: "#/" }, "Overview"))],
    };
  return { current: name, make: page[2] };
}

function decodeQuietly(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function show() {
  if (location.hash === "#main") return; // the way past the navigation
  const { hash } = location;
  const { current, make } = findPage(hash);
  document
    .getElementById("nav")
    .replaceChildren(
      ...PAGES.map(([path, label, , count]) =>
        h(
          "a",
          { href: `#/${path}`, "aria-current": path === current ? "page" : null },
          label,
          count && h("span", { class: "count" }, formatCount(count())),
        ),
      ),
    );
  const main = document.getElementById("main");
  tip("");
  main.replaceChildren();
  append(main, [make()]);
  const title = main.querySelector("h1")?.textContent || "";
  document.title = `${title.slice(0, 80)} – tripwire`;
  scrollTo(0, 0);
  main.focus({ preventScroll: true });
  main.dataset.page = hash;
}

document.getElementById("run-title").textContent = visible(report.title);
const searchBox = document.getElementById("search");
document.getElementById("search-form").addEventListener("submit", (event) => {
  event.preventDefault();
  location.hash = `#/search/${encodeURIComponent(searchBox.value)}`;
});
addEventListener("keydown", (event) => {
  const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName);
  if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) {
    event.preventDefault();
    searchBox.focus();
    searchBox.select();
  }
});
addEventListener("hashchange", show);
show();
