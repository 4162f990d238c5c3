"use strict";
// Shared by all pages: the numbers, elements made of plain text, tables, and the theme.
const Page = (() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
  const themes = ["system", "light", "dark"];
  const onTheme = [];

  // Text always becomes a text node: no text of a chat is parsed as HTML.
  function make(tag, attributes, ...children) {
    const svg = tag === "svg" || tag === "path" || tag === "title:svg";
    const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag.split(":")[0]) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name === "on") for (const [event, handler] of Object.entries(value)) element.addEventListener(event, handler);
      else if (name === "width%") element.style.width = `${value}%`;
      else element.setAttribute(name, value === true ? "" : value);
    }
    for (const child of children.flat(Infinity)) {
      if (child !== null && child !== undefined) element.append(child);
    }
    return element;
  }

  const count = (number) => (number === null || number === undefined ? "not recorded" : whole.format(number));
  const percent = (share, digits = 1) => (share === null || share === undefined ? "not recorded" : `${(100 * share).toFixed(digits)}\u00a0%`);
  const decimal = (number, digits = 2) => Number(number).toFixed(digits);
  const counted = (number, noun) => `${whole.format(number)} ${noun}${number === 1 ? "" : "s"}`;
  function short(number) {
    const size = Math.abs(number);
    if (size >= 1e9) return `${+(number / 1e9).toPrecision(3)}G`;
    if (size >= 1e6) return `${+(number / 1e6).toPrecision(3)}M`;
    if (size >= 1e4) return `${+(number / 1e3).toPrecision(3)}k`;
    return size >= 1 || size === 0 ? `${+number.toPrecision(4)}` : `${+number.toPrecision(2)}`;
  }

  function section(id, title, ...children) {
    return make("section", { class: "part", id, "aria-labelledby": `${id}-title` }, make("h2", { id: `${id}-title` }, title), ...children);
  }

  // columns: {title, cell: entry => text or element, number: bool}; the first column names the entry.
  function table(caption, columns, entries, isChosen = () => false) {
    const head = make("tr", {}, columns.map((one) => make("th", { scope: "col", class: one.number ? "number" : null }, one.title)));
    const body = entries.map((entry) =>
      make("tr", { class: isChosen(entry) ? "chosen" : null }, columns.map((one, place) =>
        make(place ? "td" : "th", { scope: place ? null : "row", class: one.number ? "number" : null }, one.cell(entry)))));
    return make("div", { class: "scroll", role: "region", tabindex: "0", "aria-label": caption },
      make("table", {}, make("caption", { class: "hidden-but-read" }, caption), make("thead", {}, head), make("tbody", {}, body)));
  }

  // How the formats of report/tables.py are shown.
  const formats = {
    text: (value) => value,
    count,
    percent,
    percent2: (value) => percent(value, 2),
    decimal,
    times: (value) => `${decimal(value, 3)}×`,
    bar: (value) => make("span", {}, bar(value), percent(value)),
  };

  // drawn: {columns: [{title, format}], rows}, as report/tables.py makes them.
  function drawTable(caption, drawn, isChosen) {
    const shown = (value, format) => (value === null ? "–" : typeof value === "string" ? value : formats[format](value));
    return table(caption, drawn.columns.map(({ title, format }, place) => (
      { title, number: place > 0 && !["text", "bar"].includes(format), cell: (row) => shown(row[place], format) })), drawn.rows, isChosen);
  }

  function numbers(entries) {
    return make("dl", { class: "numbers" }, entries.filter(Boolean).map(([name, value, more]) =>
      make("div", {}, make("dt", {}, name), make("dd", {}, value, more ? make("small", {}, more) : null))));
  }

  function bar(share) {
    return make("span", { class: "bar", "aria-hidden": "true" }, make("span", { "width%": Math.max(0, Math.min(100, 100 * share)) }));
  }

  function contents(sections) {
    document.getElementById("contents").replaceChildren(...sections.map(([id, title, badge]) =>
      make("li", {}, make("a", { href: `#${id}` }, title), badge ? make("span", { class: "badge found" }, badge) : null)));
  }

  function stored(value) {
    try { // a browser may forbid storage to pages opened from disk
      if (value) localStorage.setItem("packed-sft-theme", value);
      return localStorage.getItem("packed-sft-theme");
    } catch { return null; }
  }

  function setTheme(theme) {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    onTheme.forEach((redraw) => redraw());
  }

  function themeChooser() {
    const chosen = themes.includes(stored()) ? stored() : "system";
    const select = make("select", { id: "theme", on: { change: () => { stored(select.value); setTheme(select.value); } } },
      themes.map((theme) => make("option", { value: theme, selected: theme === chosen }, theme)));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => onTheme.forEach((redraw) => redraw()));
    setTheme(chosen);
    return make("label", { for: "theme" }, "Theme", select);
  }

  function color(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  }

  return { data, make, count, percent, decimal, counted, short, section, table, drawTable, numbers, bar, contents, themeChooser, color, onTheme };
})();
