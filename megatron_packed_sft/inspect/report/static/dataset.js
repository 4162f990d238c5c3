"use strict";
// The page of a dataset: one split at a time.
(() => {
  const { data, make, count, percent, decimal, counted, section, table, drawTable, numbers } = Page;
  const names = Object.keys(data.splits);
  const main = document.getElementById("main");
  const changing = make("div", {});
  let chosen = null;

  const tokens = (low, high) => (high - low === 1 ? count(high) : `${count(low + 1)}–${count(high)}`);
  const shares = (low, high) => `${(100 * low).toFixed(0)}–${(100 * high).toFixed(0)}\u00a0%`;
  const asPercent = (share) => `${+(100 * share).toFixed(1)}%`;

  function header() {
    const picker = make("select", { id: "split", on: { change: () => { pick(picker.value); } } }, names.map((name) => make("option", { value: name }, name)));
    const made = [`packed data, ${data.storage}`, data.tokenizer ? `tokenizer ${data.tokenizer.name}` : "no tokenizer recorded"];
    document.getElementById("header").append(
      make("div", {}, make("h1", {}, data.title), make("p", { class: "made" }, made.join(" · "))),
      make("div", { class: "controls" }, names.length > 1 ? make("label", { for: "split" }, "Split", picker) : null, Page.themeChooser()));
    document.getElementById("footer").textContent = `Made by packed-sft report ${data.version}. It loads nothing from a network and can be sent as a file.`;
  }

  function totals(split) {
    const t = split.totals;
    const partly = split.read.num_bins < t.num_bins;
    const trained = t.num_trained === null && !partly ? t.num_trained_read : t.num_trained;
    return section("totals", "Totals",
      data.tokenizer_note ? make("p", { class: "note warn" }, `Ids are shown instead of text: ${data.tokenizer_note}.`) : null,
      numbers([
        ["Bins", count(t.num_bins), t.num_shards ? `of ${count(t.pack_size)} tokens, in ${counted(t.num_shards, "shard")}` : `of ${count(t.pack_size)} tokens`],
        ["Sequences", count(t.num_sequences), `${decimal(t.mean_sequences, 1)} per bin, at most ${count(t.most_sequences)}`],
        ["Tokens", count(t.num_tokens), `${count(t.num_padding)} positions empty`],
        ["Full", percent(t.fullness, 2), `emptiest: bin ${count(t.emptiest_bin)}, ${percent(t.emptiest / t.pack_size)}`],
        ["Trained tokens", count(trained), trained === null ? "not recorded in the data" : `${percent(trained / t.num_tokens)} of all tokens`],
        t.has_weights ? ["Sum of weights", Page.short(t.sum_weights), "of all trained tokens"] : null,
        ["Sequence length", count(t.median), `median; ${count(t.shortest)} to ${count(t.longest)}`],
      ]),
      make("p", { class: "soft" }, sampled(split)));
  }

  function sampled(split) {
    const { read, totals: t } = split;
    const lengths = `Lengths, fullness and attention cover all ${counted(t.num_bins, "bin")}. `;
    if (read.num_bins === t.num_bins) return `${lengths}Trained shares and findings do so, too: every token was read.`;
    return `${lengths}Trained shares and findings come from an even sample: ${counted(read.num_bins, "bin")} with ${counted(read.num_sequences, "sequence")} and ${counted(read.num_tokens, "token")}.`;
  }

  function findings(split) {
    const found = split.suspicions.filter((one) => one.num_found);
    const clean = split.suspicions.filter((one) => !one.num_found && !one.unchecked);
    const unchecked = split.suspicions.filter((one) => one.unchecked);
    const link = (one) => make("li", {}, make("a", { href: `#bin/${encodeURIComponent(chosen)}/${one.bin}/${one.sequence + 1}/${one.position}` }, `Bin ${count(one.bin)}, sequence ${one.sequence + 1}`), `: ${one.note}`);
    return section("findings", "Worth a look",
      make("p", {}, found.length ? "Sequences that are usually not intended. Each link opens the bin." : "Nothing suspicious was found."),
      found.map((one) => make("div", { class: "finding", id: `finding-${one.kind}` },
        make("h3", {}, one.title, make("span", { class: "badge found" }, counted(one.num_found, "sequence"))), make("p", {}, one.meaning),
        make("ul", { class: "plain" }, one.examples.map(link)),
        one.num_found > one.examples.length ? make("p", { class: "soft" }, `${count(one.examples.length)} of ${count(one.num_found)} are listed.`) : null)),
      clean.length ? make("p", { class: "soft" }, `Looked for and not found: ${clean.map((one) => one.title.toLowerCase()).join(", ")}.`) : null,
      unchecked.map((one) => make("p", { class: "soft" }, `Not checked: ${one.title.toLowerCase()} (${one.unchecked}).`)));
  }

  function lengths(split) {
    const t = split.totals;
    const line = split.fullness.line;
    const isGrouped = line.at.length < t.num_bins;
    return section("lengths", "Lengths and fullness", make("div", { class: "side-by-side" },
      Charts.histogram("Sequence lengths", `${counted(t.num_sequences, "sequence")}; the dashed line is the pack size.`, split.lengths,
        { x: "tokens", y: "sequences", bucket: tokens, at: t.pack_size, atText: `pack size ${count(t.pack_size)}` }),
      Charts.histogram("Fullness of bins", `${percent(t.fullness, 2)} of all positions hold a token.`, split.fullness.histogram,
        { x: "full", y: "bins", bucket: shares, format: asPercent }),
      Charts.lines("Fullness in stored order", isGrouped ? `Bins in ${count(line.at.length)} groups: mean and emptiest of each.` : "Bin by bin.", line.at,
        isGrouped ? [{ label: "mean", values: line.mean, color: "accent" }, { label: "emptiest", values: line.lowest, color: "second", dash: [4, 3] }] : [{ label: "full", values: line.mean, color: "accent" }],
        { x: "bin", y: "full", format: asPercent }),
      Charts.histogram("Trained share of sequences", `On average ${percent(split.trained.mean)} of a sequence is trained; from ${counted(split.read.num_sequences, "sequence")}.`, split.trained,
        { x: "trained", y: "sequences", bucket: shares, format: asPercent })));
  }

  function attention(split) {
    const a = split.attention;
    return section("attention", "Attention cost",
      make("p", {}, `Attention costs the sum of the squared sequence lengths of a bin. On average this is ${percent(a.mean_share)} of the cost of one sequence that fills the bin. The most expensive is bin ${count(a.costliest_bin)} with ${percent(a.costliest_share)}.`),
      make("div", { class: "side-by-side" },
        Charts.histogram("Attention cost of bins", "As a share of the cost of one sequence that fills the bin.", a.histogram, { x: "share", y: "bins", bucket: shares, format: asPercent }),
        !a.num_steps ? make("p", { class: "note" }, `The split has fewer bins than one step of ${count(a.global_batch)}; choose a smaller --global-batch-size to see the balance.`)
        : Charts.lines("Balance over ranks, step by step", `${counted(a.num_steps, "step")} of ${counted(a.global_batch, "bin")} on ${counted(a.ranks, "rank")}, in stored order: the busiest rank over the mean of all ranks.`, a.steps.at,
          [{ label: "slowest / mean", values: a.steps.highest, color: "accent" }], { x: "step", y: "slowest / mean", format: (value) => decimal(value, 2), low: 1 }),
        a.num_steps ? Charts.lines("Attention cost of steps", "Over the mean of all steps, in stored order. Even steps take equally long.", a.step_costs.at,
          a.step_costs.at.length < a.num_steps
            ? [{ label: "highest", values: a.step_costs.highest, color: "accent" }, { label: "lowest", values: a.step_costs.lowest, color: "second", dash: [4, 3] }]
            : [{ label: "cost", values: a.step_costs.mean, color: "accent" }],
          { x: "step", y: "cost / mean", format: (value) => decimal(value, 2) }) : null),
      make("p", {}, `Every rank waits for the busiest one: 1.0 is even; at 1.5 a step takes half as long again. Choose other shapes with --ranks and --global-batch-size.`),
      !a.num_steps ? null : drawTable("Balance by the order of bins", a.orders),
      a.others.rows.length ? make("details", {}, make("summary", {}, "Other batches and ranks, in stored order"), drawTable("Balance of other batches and ranks", a.others)) : null);
  }

  function strategies(split) {
    const s = split.strategies;
    const used = data.settings.find(([key]) => key === "packing.strategy");
    const of = s.num_sequences < s.of ? `${count(s.num_sequences)} of ${counted(s.of, "sequence")}` : `the ${counted(s.of, "sequence")}`;
    return section("strategies", "Strategies compared",
      make("p", {}, `Every strategy packs ${of}, shuffled once, into bins of ${count(split.totals.pack_size)}.${used ? ` This dataset was packed with ${used[1]}.` : ""}`),
      drawTable("Strategies compared", s.table, (row) => used && row[0] === used[1]),
      make("p", { class: "soft" }, "The bound is the smallest number of bins that any packing of these sequences could have."));
  }

  function sources() {
    if (!data.has_provenance) return section("sources", "Sources and drops", make("p", { class: "soft" }, "Not recorded, because packed-sft prepare did not publish this data."));
    return section("sources", "Sources and drops",
      drawTable("Sources", data.source_table),
      make("p", { class: "soft" }, "Sequences and tokens are those in the bins of all splits."),
      data.sources.map((one) => make("details", {}, make("summary", {}, `${one.name}: ${counted(one.files.length, "file")}`),
        make("ul", { class: "plain" }, one.files.map((file) => make("li", {}, `${file.name}, ${counted(file.size, "byte")}`))))),
      make("h3", {}, "Drops"), drops());
  }

  function drops() {
    if (!data.drops.length) return make("p", {}, "Nothing was dropped.");
    return make("div", {}, drawTable("Drops by reason", data.drop_table),
    data.drops.map((one) => make("details", {}, make("summary", {}, `${one.reason}: examples`),
      one.examples.length ? make("ul", { class: "plain" }, one.examples.map((example) => make("li", {}, example.where, example.record ? make("pre", { class: "said", tabindex: "0", "aria-label": "The record", dir: "auto" }, example.record) : null)))
        : make("p", { class: "soft" }, "Not recorded here; prepare with rejects=FILE writes a list."))));
  }

  function settings() {
    const entries = [["storage", data.storage], ["tokenizer", data.tokenizer ? `${data.tokenizer.name} (${data.tokenizer.fingerprint})` : "not recorded"],
      ["chat template", data.chat_template || "not recorded"], ...data.settings.map(([key, value]) => [key, typeof value === "string" ? value : JSON.stringify(value)])];
    return section("made-with", "Made with", make("details", {}, make("summary", {}, `${counted(entries.length, "setting")}`),
      table("Settings", [{ title: "setting", cell: ([key]) => make("code", {}, key) }, { title: "value", cell: ([, value]) => make("code", {}, value) }], entries)));
  }

  function pick(name) {
    chosen = name;
    const split = data.splits[name];
    const found = split.suspicions.reduce((sum, one) => sum + one.num_found, 0);
    changing.replaceChildren(totals(split), findings(split), lengths(split), attention(split), strategies(split));
    Bins.choose(name, split.totals, split.shown);
    const picker = document.getElementById("split");
    if (picker) picker.value = name;
    Page.contents([["totals", "Totals"], ["findings", "Worth a look", found ? count(found) : null], ["lengths", "Lengths"], ["attention", "Attention"],
      ["strategies", "Strategies"], ["bins", "Bins"], ["sources", "Sources and drops"], ["made-with", "Made with"]]);
  }

  header();
  main.append(changing, section("bins", "Bins", Bins.build()), sources(), settings());
  pick(names[0]);
  const followed = () => Bins.follow(location.hash, pick);
  addEventListener("hashchange", followed);
  addEventListener("popstate", followed);
  followed();
})();
