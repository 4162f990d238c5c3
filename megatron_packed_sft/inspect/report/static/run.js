"use strict";
// The page of a training run.
(() => {
  const { data, make, count, percent, decimal, counted, section, table, numbers, short } = Page;
  const main = document.getElementById("main");
  const { curves, validation, mixture, last } = data;
  const colors = ["accent", "second", "third", "trained-line", "soft"];
  const dashes = [undefined, [6, 3], [2, 3], [8, 3, 2, 3]];
  const style = (place) => ({ color: colors[place % colors.length], dash: dashes[Math.floor(place / colors.length) % dashes.length] });
  const asPercent = (share) => `${+(100 * share).toPrecision(3)}%`;
  const plain = (value) => `${+Number(value).toPrecision(4)}`;

  function header() {
    const losses = { per_token: "mean over trained tokens", weighted_per_token: "mean over trained tokens by their weights", per_conversation: "mean over conversations" };
    document.getElementById("header").append(
      make("div", {}, make("h1", {}, data.title), make("p", { class: "made" }, `training run · loss: ${losses[data.loss_kind] || "not recorded"}`)),
      make("div", { class: "controls" }, Page.themeChooser()));
    document.getElementById("footer").textContent = `Made by packed-sft report ${data.version} from metrics.jsonl. It loads nothing from a network and can be sent as a file.`;
  }

  function totals() {
    const known = (name) => (curves[name] || []).filter((value) => value !== null);
    const mean = (name) => { const some = known(name); return some.length ? some.reduce((sum, one) => sum + one, 0) / some.length : null; };
    const losses = known("loss");
    const lastValidation = validation.names.map((name) => [name, [...validation.loss[name]].reverse().find((loss) => loss !== null)]).filter(([, loss]) => loss !== undefined);
    return section("totals", "Totals", numbers([
      last.step === undefined ? null : ["Step", count(last.step), `${decimal(last.epoch, 2)} epochs, ${counted(last.consumed_samples, "bin")}`],
      losses.length ? ["Training loss", decimal(losses[losses.length - 1], 4), `${decimal(losses[0], 4)} at the start`] : null,
      ...lastValidation.map(([name, loss]) => [`Loss on ${name}`, decimal(loss, 4), `perplexity ${short(Math.exp(loss))}`]),
      mean("tokens_per_second") === null ? null : ["Tokens per second", short(mean("tokens_per_second")), `${short(mean("trained_tokens_per_second"))} trained`],
      mean("padding_share") === null ? null : ["Padding", percent(mean("padding_share")), "of positions without a token"],
      mean("data_share") === null ? null : ["Data wait", percent(mean("data_share"), 2), "of the time, on the slowest rank"],
    ]), make("p", { class: "soft" }, curves.per_point > 1
      ? `${counted(data.num_records, "record")} in metrics.jsonl; each point of a chart is the mean of up to ${count(curves.per_point)} records.`
      : `${counted(data.num_records, "record")} in metrics.jsonl; the charts show all of them.`));
  }

  const has = (name) => curves[name] && curves[name].some((value) => value !== null);
  const curve = (name, title, note, more, others = []) => (has(name)
    ? Charts.lines(title, note, curves.step, [{ label: more.label || more.y, values: curves[name], color: "accent" }, ...others], { x: "step", ...more }) : null);

  function training() {
    const trained = has("trained_tokens_per_second") ? [{ label: "trained", values: curves.trained_tokens_per_second, color: "second", dash: [6, 3] }] : [];
    return section("training", "Training", make("div", { class: "side-by-side" },
      curve("loss", "Training loss", null, { y: "loss", format: plain }),
      curve("learning_rate", "Learning rate", null, { y: "learning rate", format: (value) => (value ? value.toExponential(1) : "0") }),
      curve("grad_norm", "Gradient norm", "Before clipping.", { y: "norm", format: plain }),
      curve("tokens_per_second", "Tokens per second", "Over all ranks.", { y: "tokens/s", label: "all", low: 0 }, trained),
      curve("padding_share", "Padding", "Share of positions without a token.", { y: "padding", format: asPercent, low: 0 }),
      curve("data_share", "Waiting for data", "Share of the time, on the slowest rank.", { y: "wait", format: asPercent, low: 0 })));
  }

  function bySource() {
    const parts = [];
    if (validation.step.length) {
      parts.push(Charts.lines("Validation loss by source", null, validation.step, validation.names.map((name, place) => ({ label: name, values: validation.loss[name], width: 2, ...style(place) })), { x: "step", y: "loss", format: plain }));
    }
    if (mixture.step.length) {
      parts.push(Charts.lines("Mixture by source", "Share of all bins so far.", mixture.step, mixture.names.map((name, place) => ({ label: name, values: mixture.share[name], width: 2, ...style(place) })), { x: "step", y: "share", format: asPercent, low: 0 }));
    }
    const at = mixture.step.length - 1;
    const number = (values) => (values[at] === null || values[at] === undefined ? "–" : values[at]);
    return section("sources", "By source",
      parts.length ? make("div", { class: "side-by-side" }, parts) : null,
      mixture.names.length ? table("Mixture at the last step", [{ title: "source", cell: (name) => name },
        { title: "weight now", number: true, cell: (name) => plain(number(mixture.weight[name])) }, { title: "share", number: true, cell: (name) => percent(number(mixture.share[name]), 2) },
        { title: "bins", number: true, cell: (name) => count(number(mixture.num_samples[name])) }, { title: "epochs", number: true, cell: (name) => plain(number(mixture.epochs[name])) }], mixture.names)
        : make("p", { class: "soft" }, "The mixture is recorded for blends only (data.weights)."),
      validation.step.length ? null : make("p", { class: "soft" }, "Nothing was validated."));
  }

  function samples() {
    if (!data.samples.length) return section("samples", "What the model says", make("p", { class: "soft" }, "Not recorded; set validation.num_samples to answer some prompts after each validation."));
    return section("samples", "What the model says", data.samples.map((file, place) => make("details", { open: place === 0 }, make("summary", {}, file.title || "samples"),
      file.prompts.map((one, number) => make("div", { class: "finding" }, make("h3", {}, `Prompt ${number + 1}`, make("span", { class: "soft" }, `bin ${count(one.bin)}`)),
        make("pre", { class: "said", tabindex: "0", "aria-label": `Prompt ${number + 1}`, dir: "auto" }, one.prompt),
        make("strong", {}, "The model says"), make("pre", { class: "said", tabindex: "0", "aria-label": "The model says", dir: "auto" }, one.said),
        make("strong", {}, "The data says"), make("pre", { class: "said", tabindex: "0", "aria-label": "The data says", dir: "auto" }, one.expected))))));
  }

  function settings() {
    return section("settings", "Settings",
      make("p", { class: "soft" }, data.checkpoints.length ? `Checkpoints: ${data.checkpoints.join(", ")}.` : "No checkpoint is kept."),
      data.config === null ? make("p", { class: "soft" }, "config.yaml is missing.") : make("details", {}, make("summary", {}, "config.yaml"), make("pre", { class: "said", tabindex: "0", "aria-label": "config.yaml" }, data.config)));
  }

  header();
  main.append(totals(), training(), bySource(), samples(), settings());
  Page.contents([["totals", "Totals"], ["training", "Training"], ["sources", "By source"], ["samples", "Samples"], ["settings", "Settings"]]);
})();
