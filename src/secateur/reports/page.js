(() => {
"use strict";
const $ = (selector, root = document) => root.querySelector(selector);
const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];
const page = document.documentElement;
const data = JSON.parse($("#secateur-data").textContent);
page.classList.add("js");

// Colours: Auto follows the system. A file that is opened from disk or in a notebook may have no storage.
const stored = { get() { try { return localStorage.getItem("secateur-theme"); } catch { return null; } },
                 set(value) { try { localStorage.setItem("secateur-theme", value); } catch { /* not kept */ } } };
const paint = theme => {
  if (theme === "auto") page.removeAttribute("data-theme"); else page.setAttribute("data-theme", theme);
  $(`.theme [value=${theme}]`).checked = true;
};
paint(["light", "dark"].includes(stored.get()) ? stored.get() : "auto");
$$(".theme input").forEach(input => input.addEventListener("change", () => { paint(input.value); stored.set(input.value); }));

// The network: one column at a time is read out.
const plot = $("#plot"), rows = $$("#layers tbody tr");
let at = 0, show = () => {};
if (plot) {
  const columns = JSON.parse(plot.dataset.columns), width = +plot.dataset.width;
  const readout = $("#readout"), cursors = $$(".cursor", plot);
  const number = value => value.toLocaleString("en"), sum = (layers, read) => layers.reduce((all, layer) => all + read(layer), 0);
  const size = shape => shape ? shape.reduce((a, b) => a * b, 1) : 0;
  const micro = value => value < 99.95 ? value.toFixed(1) : number(Math.round(value));
  const now = layer => layer.format && layer.sparse_us !== undefined ? layer.sparse_us : layer.dense_us;
  const facts = layers => {
    const one = layers.length === 1 ? layers[0] : null, kept = sum(layers, l => l.kept), held = sum(layers, l => size(l.after));
    const found = [one ? ["channels", one.after ? `${number(one.channels[0])} → ${number(one.channels[1])}` : "removed"]
                       : ["layers", number(layers.length)],
                   ["weights", `${number(sum(layers, l => size(l.before)))} → ${number(kept)}`],
                   ["zeros", held ? `${(100 * (1 - kept / held)).toFixed(1)} %` : "–"]];
    const timed = layers.filter(l => l.dense_us !== undefined), packed = layers.filter(l => l.format);
    if (timed.length) {
      const [before, after] = [sum(timed, l => l.dense_us), sum(timed, now)];
      found.push(["time", packed.length ? `${micro(before)} → ${micro(after)} µs` : `${micro(before)} µs`]);
    }
    if (one && one.gate !== undefined) found.push(["inputs zeroed", `${(100 * one.gate).toFixed(1)} %`]);
    if (one && (one.format || timed.length)) found.push(["format", one.format || "dense"]);
    else if (one && one.pattern) found.push(["pattern", one.pattern]);
    return found;
  };
  const element = (tag, text, name = "") => Object.assign(document.createElement(tag), { textContent: text, className: name });
  show = place => {
    at = Math.max(0, Math.min(columns.length - 1, place));
    const [x, name, ...members] = columns[at], found = facts(members.map(i => data.layers[i]));
    cursors.forEach(cursor => {
      cursor.classList.add("on");
      cursor.style.left = `${100 * x / width}%`;
      cursor.style.width = `${100 / width}%`;
    });
    readout.replaceChildren(element("span", name, "nm"), ...found.map(([key, value]) => {
      const part = element("span", `${key} `);
      part.append(element("b", value));
      return part;
    }));
    plot.setAttribute("aria-valuenow", at + 1);
    plot.setAttribute("aria-valuetext", `${name}: ${found.map(pair => pair.join(" ").replace("→", "to")).join(", ")}`);
    rows.forEach(row => row.classList.toggle("on", members.includes(+row.dataset.i)));
  };
  const point = event => {
    const box = cursors[0].parentNode.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * width;
    const place = columns.findIndex(column => x < column[0] + 1);
    show(place < 0 ? columns.length - 1 : place);
  };
  plot.setAttribute("role", "slider");
  plot.setAttribute("tabindex", "0");
  plot.setAttribute("aria-label", "Layer. Use the arrow keys to read one layer after the other.");
  plot.setAttribute("aria-valuemin", 1);
  plot.setAttribute("aria-valuemax", columns.length);
  plot.setAttribute("aria-valuenow", 1);
  plot.setAttribute("aria-valuetext", columns[0][1]);
  plot.addEventListener("pointermove", point);
  plot.addEventListener("pointerdown", point);
  plot.addEventListener("focus", () => show(at));
  plot.addEventListener("keydown", event => {
    const to = { ArrowRight: at + 1, ArrowUp: at + 1, ArrowLeft: at - 1, ArrowDown: at - 1, Home: 0, End: columns.length - 1,
                 PageUp: at + 10, PageDown: at - 10 }[event.key];
    if (to !== undefined) { event.preventDefault(); show(to); }
  });
  const columnOf = new Map(columns.flatMap(([, , ...members], place) => members.map(i => [i, place])));
  rows.forEach(row => row.addEventListener("pointerenter", () => show(columnOf.get(+row.dataset.i))));
}

// The table: sort, find, filter.
const body = $("#layers tbody");
if (body) {
  const find = $("#find"), choice = $("#choice"), headers = $$("#layers thead th");
  const value = (row, column) => column ? row.children[column].dataset.v : +row.dataset.i;
  headers.forEach((header, column) => $("button", header).addEventListener("click", () => {
    const down = header.getAttribute("aria-sort") === "ascending";
    headers.forEach(other => other.setAttribute("aria-sort", "none"));
    header.setAttribute("aria-sort", down ? "descending" : "ascending");
    const text = header.dataset.k === "s" && column > 0;
    const compare = (a, b) => {
      const [x, y] = [value(a, column), value(b, column)];
      if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
      return (down ? -1 : 1) * (text ? x.localeCompare(y) : x - y);
    };
    body.append(...[...rows].sort(compare));
  }));
  const sift = () => {
    const wanted = find.value.trim().toLowerCase();
    let left = 0;
    rows.forEach(row => {
      const fits = data.layers[row.dataset.i].name.toLowerCase().includes(wanted) && (!choice.value || row.dataset.f === choice.value);
      row.hidden = !fits;
      left += fits;
    });
    const all = `${rows.length.toLocaleString("en")} layer${rows.length === 1 ? "" : "s"}`;
    $("#count").textContent = left === rows.length ? all : `${left.toLocaleString("en")} of ${all}`;
  };
  find.addEventListener("input", sift);
  choice.addEventListener("change", sift);
}

// The recipe: copied, or selected where the clipboard is closed to pages.
const copy = $(".copy");
if (copy) copy.addEventListener("click", async () => {
  const text = $(".code pre");
  try {
    await navigator.clipboard.writeText(text.textContent);
    copy.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(text);
    copy.textContent = "Selected";
  }
  setTimeout(() => { copy.textContent = "Copy"; }, 1500);
});
})();
