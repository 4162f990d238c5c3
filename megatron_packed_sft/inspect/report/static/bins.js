"use strict";
// The browser of bins: tokens in colour, details of each, search, and the attention picture.
const Bins = (() => {
  const { make, count, percent, decimal } = Page;
  const source = Page.data.bins;
  const control = new Set(source.control);
  const decoded = new Map(); // the bin as it came -> the bin with arrays
  const MOST_RESULTS = 60;
  // Browsers lay out a paragraph as a whole, which takes seconds for 100,000 tokens: so there are stretches, which end
  // with a line where there is one, and those of long bins are laid out when they are scrolled to.
  const SHORTEST_STRETCH = 200, LONGEST_STRETCH = 1500, LONG = 8000;
  let split = null, bins = [], current = null, place = -1, packSize = 0;
  let ui = null;
  let pointer = {};
  let spans = []; // of the bin that is shown, by token

  function bytesOf(text) {
    const raw = atob(text);
    const bytes = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
    return bytes;
  }

  // Numbers of seven bits per byte, the lowest first; see BinsInPage in dataset_page.py.
  function decode(one) {
    if (decoded.has(one)) return decoded.get(one);
    const tokens = [];
    let number = 0, shift = 0;
    for (const byte of bytesOf(one.tokens)) {
      number += (byte & 127) * 2 ** shift;
      if (byte & 128) shift += 7;
      else { tokens.push(number); number = 0; shift = 0; }
    }
    const texts = tokens.map((token) => source.texts[token]);
    for (let i = 0; i < one.texts.length; i += 2) texts[one.texts[i]] = one.texts[i + 1];
    const weights = new Float32Array(tokens.length);
    for (let i = 0, at = 0; i < one.runs.length; i += 2) {
      weights.fill(one.runs[i + 1], at, at + one.runs[i]);
      at += one.runs[i];
    }
    const ends = [...one.starts.slice(1), tokens.length];
    const result = { number: one.number, tokens, texts, weights, starts: one.starts, ends, origins: one.origins, text: null, offsets: null };
    decoded.set(one, result);
    return result;
  }

  function sequenceAt(bin, token) {
    let low = 0, high = bin.starts.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (bin.starts[middle] <= token) low = middle; else high = middle - 1;
    }
    return low;
  }

  function originOf(bin, sequence) {
    const origin = bin.origins && bin.origins[sequence];
    if (!origin) return null;
    const file = source.files[origin[0]];
    return { file, line: origin[1], noun: /\.jsonl(\.\w+)?$/.test(file) ? "line" : "record" };
  }

  const address = (bin, sequence, token) =>
    `#bin/${encodeURIComponent(split)}/${bin}${sequence === undefined ? "" : `/${sequence + 1}${token === undefined ? "" : `/${token}`}`}`;

  function build() {
    const previous = make("button", { type: "button", id: "previous-bin", on: { click: () => go(place - 1) } }, "← Previous");
    const next = make("button", { type: "button", id: "next-bin", on: { click: () => go(place + 1) } }, "Next →");
    const picker = make("select", { id: "pick-bin", on: { change: () => go(Number(picker.value)) } });
    const query = make("input", { type: "search", id: "search-text", placeholder: source.has_text ? "Search the text of these bins" : "Search ids, such as 15 7", autocomplete: "off", spellcheck: "false" });
    const form = make("form", { role: "search", on: { submit: (event) => { event.preventDefault(); search(query.value); } } },
      make("label", { for: "search-text", class: "hidden-but-read" }, "Search in the bins of this page"), query, make("button", { type: "submit" }, "Search"));
    const bounds = make("input", { type: "checkbox", id: "bounds", checked: true, on: { change: () => ui.view.classList.toggle("bounds", bounds.checked) } });
    const results = make("div", { id: "results", "aria-live": "polite" });
    const shown = make("p", { class: "soft", id: "bin-summary", "aria-live": "polite" });
    const view = make("div", { class: "bounds", id: "bin-view" });
    const details = make("div", { class: "panel details", id: "token-details", "aria-live": "polite" });
    const attention = make("div", { class: "panel", id: "attention-picture" });
    const sampled = make("p", { class: "soft" });
    view.addEventListener("pointerover", (event) => {
      // A token that was scrolled below a resting pointer is not pointed at.
      const rests = pointer.x === event.clientX && pointer.y === event.clientY;
      if (event.target.dataset.at && !rests) describe(Number(event.target.dataset.at));
    });
    for (const name of ["pointermove", "pointerdown"]) addEventListener(name, (event) => { pointer = { x: event.clientX, y: event.clientY }; }, { capture: true, passive: true });
    view.addEventListener("click", (event) => { if (event.target.dataset.at) move(Number(event.target.dataset.at), false); });
    view.addEventListener("focusin", (event) => { if (event.target.dataset.sequence) enter(Number(event.target.dataset.sequence)); });
    view.addEventListener("keydown", onKey);
    ui = { previous, next, picker, query, results, shown, view, details, attention, sampled, at: -1 };
    return [sampled,
      make("div", { class: "toolbar" }, previous, make("label", { for: "pick-bin" }, make("span", { class: "hidden-but-read" }, "Bin"), picker), next, form),
      results,
      make("ul", { class: "legend", "aria-label": "Legend" },
        make("li", {}, make("span", { class: "t on" }, "trained"), ": its loss counts"), make("li", {}, make("span", { class: "t" }, "given"), ": input only"),
        source.has_text ? make("li", {}, make("span", { class: "t control" }, "control"), " token") : null,
        make("li", {}, make("label", { for: "bounds" }, bounds, "token boundaries"))),
      shown,
      make("div", { class: "browser" }, view, make("div", { class: "beside" }, details, attention))];
  }

  function choose(name, totals, sample) {
    split = name;
    bins = source.splits[name] || [];
    packSize = totals.pack_size;
    ui.sampled.textContent = bins.length === sample.of
      ? `All ${Page.counted(sample.of, "bin")} of the split are in this page.`
      : `${count(bins.length)} of ${count(sample.of)} bins are in this page: those of the findings and an even spread of the others. packed-sft report --bin N adds a bin.`;
    ui.picker.replaceChildren(...bins.map((one, number) => make("option", { value: number }, `Bin ${count(one.number)} · ${Page.counted(one.starts.length, "sequence")}`)));
    ui.results.replaceChildren();
    ui.query.value = "";
    place = -1;
    if (bins.length) show(0);
  }

  function go(number, sequence, token) {
    if (number < 0 || number >= bins.length) return;
    history.pushState(null, "", address(bins[number].number, sequence, token));
    show(number, sequence, token);
  }

  // The address of a bin: #bin/train/12, #bin/train/12/3 (its third sequence), #bin/train/12/3/40 (a token of it).
  function follow(hash, pickSplit) {
    const found = /^#bin\/([^/]+)\/(\d+)(?:\/(\d+))?(?:\/(\d+))?$/.exec(hash);
    if (!found) return false;
    const name = decodeURIComponent(found[1]);
    if (name !== split) {
      if (!Object.hasOwn(source.splits, name)) return false;
      pickSplit(name);
    }
    const wanted = Number(found[2]);
    const number = bins.findIndex((one) => one.number === wanted);
    document.getElementById("bins").scrollIntoView();
    if (number < 0) {
      ui.results.replaceChildren(make("p", { class: "note warn" }, `Bin ${count(wanted)} is not in this page. packed-sft report --bin ${wanted} adds it.`));
      return true;
    }
    ui.results.replaceChildren();
    show(number, found[3] === undefined ? undefined : Number(found[3]) - 1, found[4] === undefined ? undefined : Number(found[4]));
    return true;
  }

  function show(number, sequence, token) {
    place = number;
    current = decode(bins[number]);
    ui.at = -1;
    ui.picker.value = String(number);
    ui.previous.disabled = number === 0;
    ui.next.disabled = number === bins.length - 1;
    const trained = current.weights.reduce((sum, weight) => sum + (weight > 0 ? 1 : 0), 0);
    ui.shown.textContent = `Bin ${count(current.number)}: ${Page.counted(current.starts.length, "sequence")}, ${Page.counted(current.tokens.length, "token")}, ` +
      `${percent(current.tokens.length / packSize)} full, ${percent(trained / current.tokens.length)} trained.`;
    spans = new Array(current.tokens.length);
    ui.view.classList.toggle("long", current.tokens.length > LONG);
    ui.view.replaceChildren(...current.starts.map((start, one) => sequenceView(one)));
    ui.attention.replaceChildren(...attentionPicture());
    describe(null);
    if (sequence !== undefined && sequence < current.starts.length) {
      const at = current.starts[sequence] + Math.min(token || 0, current.ends[sequence] - current.starts[sequence] - 1);
      move(at, true);
    }
  }

  function sequenceView(sequence) {
    const bin = current, start = bin.starts[sequence], end = bin.ends[sequence];
    let trained = 0;
    const tokens = make("div", { class: "tokens", tabindex: "0", role: "group", "data-sequence": sequence,
      "aria-label": `Tokens of sequence ${sequence + 1}; the arrow keys move from token to token` });
    let stretch = null;
    for (let at = start; at < end; at++) {
      const text = bin.texts[at];
      const size = stretch ? stretch.childElementCount : 0;
      if (!stretch || size >= LONGEST_STRETCH || (size >= SHORTEST_STRETCH && bin.texts[at - 1].endsWith("\n"))) {
        stretch = make("div", { class: "stretch", dir: "auto" });
        tokens.append(stretch);
      }
      let kind = "t";
      if (bin.weights[at] > 0) { kind += " on"; trained++; }
      if (control.has(bin.tokens[at])) kind += " control";
      if (text === "") kind += " later";
      else if (text[0] === "\n") kind += " line";
      const span = document.createElement("span");
      span.className = kind;
      span.dataset.at = at;
      span.textContent = text;
      stretch.append(span);
      spans[at] = span;
    }
    const origin = originOf(bin, sequence);
    return make("div", { class: "sequence", id: `sequence-${sequence + 1}` },
      make("h3", {}, `Sequence ${sequence + 1}`, make("span", {}, `${Page.counted(end - start, "token")}, ${percent(trained / (end - start))} trained`),
        origin ? make("span", {}, `${origin.file.split("/").pop()}, ${origin.noun} ${count(origin.line)}`) : null), tokens);
  }

  function describe(at) {
    if (at === null) {
      ui.details.replaceChildren(make("h3", {}, "Token"), make("p", { class: "soft" }, "Point at a token, tap it, or move with Tab and the arrow keys."));
      return;
    }
    const bin = current, sequence = sequenceAt(bin, at), token = bin.tokens[at], origin = originOf(bin, sequence);
    const weight = bin.weights[at];
    const trained = weight > 0 ? (weight === 1 ? "yes" : `yes, weight ${decimal(weight, 3)}`) : "no";
    const shown = bin.texts[at] === "" ? "a further part of the character before it" : JSON.stringify(bin.texts[at]).replaceAll("\\\\u", "\\u");
    const entries = [
      ["Text", source.has_text ? make("span", { class: "mono shown" }, shown) : "no tokenizer"],
      ["Id", count(source.ids[token])],
      ["Trained", trained],
      control.has(token) ? ["Kind", "control token"] : null,
      ["Position", `${count(at - bin.starts[sequence])} in sequence ${sequence + 1}, ${count(at)} in the bin`],
      ["Source", origin ? `${origin.file}, ${origin.noun} ${count(origin.line)}` : "not recorded"],
    ];
    ui.details.replaceChildren(make("h3", {}, "Token"), make("dl", {}, entries.filter(Boolean).map(([name, value]) => [make("dt", {}, name), make("dd", {}, value)])));
    for (const block of ui.attention.querySelectorAll(".block")) block.classList.toggle("now", Number(block.dataset.block) === sequence);
  }

  function move(at, scroll) {
    if (ui.at >= 0) spans[ui.at].classList.remove("now");
    ui.at = at;
    spans[at].classList.add("now");
    if (scroll) bringIntoView(at, 12);
    describe(at);
  }

  // Stretches that are laid out on the way there move it, so it is looked after for some frames.
  function bringIntoView(at, frames) {
    if (ui.at !== at || !frames) return;
    const box = spans[at].getBoundingClientRect();
    if (frames === 12 || box.top < 60 || box.bottom > innerHeight * 0.8) spans[at].scrollIntoView({ block: "center", behavior: "instant" });
    requestAnimationFrame(() => bringIntoView(at, frames - 1));
  }

  function enter(sequence) {
    if (ui.at < 0 || sequenceAt(current, ui.at) !== sequence) move(current.starts[sequence], false);
  }

  function onKey(event) {
    if (event.target.dataset.sequence === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
    const sequence = Number(event.target.dataset.sequence);
    const first = current.starts[sequence], last = current.ends[sequence] - 1;
    const to = { ArrowRight: ui.at + 1, ArrowLeft: ui.at - 1, Home: first, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    move(Math.max(first, Math.min(last, to)), false);
    spans[ui.at].scrollIntoView({ block: "nearest" });
  }

  function attentionPicture() {
    const bin = current, size = bin.tokens.length;
    const picture = make("svg", { class: "attention", viewBox: `0 0 ${size} ${size}`, role: "img",
      "aria-label": `Block-diagonal attention: ${Page.counted(bin.starts.length, "block")}, one for each sequence` });
    picture.append(make("path", { class: "whole", d: `M0 0L0 ${size}L${size} ${size}Z` }));
    let cost = 0;
    bin.starts.forEach((start, sequence) => {
      const end = bin.ends[sequence];
      cost += (end - start) ** 2;
      const block = make("path", { class: sequence % 2 ? "block odd" : "block", d: `M${start} ${start}L${start} ${end}L${end} ${end}Z`, "data-block": sequence });
      block.append(make("title:svg", {}, `Sequence ${sequence + 1}: ${Page.counted(end - start, "token")}`));
      block.addEventListener("click", () => move(start, true));
      picture.append(block);
    });
    return [make("h3", {}, "Attention"), picture,
      make("p", { class: "soft" }, `Each token attends to the earlier ones of its own sequence. That costs ${percent(cost / size ** 2)} of one sequence of the same length (dashed).`)];
  }

  function textOf(bin) {
    if (bin.text === null) {
      bin.offsets = new Array(bin.texts.length);
      const parts = [];
      let length = 0;
      bin.texts.forEach((text, at) => { bin.offsets[at] = length; parts.push(text); length += text.length; });
      bin.text = parts.join("").toLowerCase();
      if (bin.text.length !== length) bin.text = parts.join(""); // a letter that changes its length in lower case
    }
    return bin.text;
  }

  function tokenAt(bin, offset) {
    let low = 0, high = bin.offsets.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (bin.offsets[middle] <= offset) low = middle; else high = middle - 1;
    }
    return low;
  }

  function search(wanted) {
    const text = wanted.toLowerCase();
    spans.forEach((span) => span.classList.remove("hit"));
    if (!text.trim()) { ui.results.replaceChildren(); return; }
    const found = [];
    let total = 0;
    bins.forEach((one, number) => {
      const bin = decode(one);
      for (let at = textOf(bin).indexOf(text); at >= 0; at = bin.text.indexOf(text, at + text.length)) {
        total++;
        if (found.length < MOST_RESULTS) found.push({ number, bin, at, token: tokenAt(bin, at), last: tokenAt(bin, at + text.length - 1) });
      }
    });
    const where = `${Page.counted(bins.length, "bin")} of this page`;
    if (!total) { ui.results.replaceChildren(make("p", { class: "note" }, `“${wanted}” is not in the ${where}.`)); return; }
    const list = make("ol", { class: "plain results" }, found.map((one) => {
      const original = one.bin.texts.slice(Math.max(0, one.token - 8), one.last + 12).join("");
      const sequence = sequenceAt(one.bin, one.token);
      return make("li", {}, make("a", { href: address(one.bin.number, sequence, one.token - one.bin.starts[sequence]), on: { click: (event) => {
        event.preventDefault();
        go(one.number, sequence, one.token - one.bin.starts[sequence]);
        for (let at = one.token; at <= one.last; at++) spans[at].classList.add("hit");
      } } }, `Bin ${count(one.bin.number)}, sequence ${sequence + 1}`), ` … ${original.replace(/\s+/g, " ").slice(0, 160)} …`);
    }));
    ui.results.replaceChildren(make("p", {}, `${Page.counted(total, "match")}`.replace("matchs", "matches") + ` in the ${where}${total > found.length ? `; the first ${found.length} are listed` : ""}.`), list);
  }

  return { build, choose, follow };
})();
