"use strict";
// Charts: uPlot with the page's colours, redrawn when the theme or the width changes, each with its numbers as a table.
const Charts = (() => {
  const { make, color, short, table } = Page;
  const HEIGHT = 220;
  const drawn = new Map(); // container -> {chart, build}

  const observer = new ResizeObserver((entries) => {
    for (const entry of entries) {
      const width = Math.floor(entry.contentRect.width);
      const one = drawn.get(entry.target);
      if (!one || width < 50) continue;
      if (!one.chart) one.chart = new uPlot(one.options(width), one.data, entry.target);
      else if (one.chart.width !== width) one.chart.setSize({ width, height: HEIGHT });
    }
  });

  Page.onTheme.push(() => {
    for (const [container, one] of drawn) {
      if (!container.isConnected) { observer.unobserve(container); drawn.delete(container); continue; }
      if (!one.chart) continue;
      const width = one.chart.width;
      one.chart.destroy();
      one.chart = new uPlot(one.options(width), one.data, container);
    }
  });

  function axis(label, format, more) {
    return { stroke: color("soft"), grid: { stroke: color("line"), width: 1 }, ticks: { stroke: color("line"), width: 1 }, label, labelSize: 16, labelGap: 2, labelFont: "12px system-ui", font: "12px system-ui", size: 30, values: (u, splits) => splits.map((one) => (one === null ? "" : format(one))), ...more };
  }

  function mount(title, note, options, data, numbers) {
    const container = make("div", { class: "chart", role: "img", "aria-label": `${title}. ${note || ""} The numbers are in the table below.` });
    drawn.set(container, { chart: null, options, data });
    observer.observe(container);
    return make("figure", {}, make("figcaption", {}, make("strong", {}, title), note), container,
      make("details", {}, make("summary", {}, "Numbers"), numbers()));
  }

  function mark(at, text) {
    return (u) => {
      const x = u.valToPos(at, "x", true);
      const ctx = u.ctx;
      const ratio = devicePixelRatio;
      ctx.save();
      ctx.strokeStyle = ctx.fillStyle = color("second");
      ctx.lineWidth = 2 * ratio;
      ctx.setLineDash([5 * ratio, 4 * ratio]);
      ctx.beginPath();
      ctx.moveTo(x, u.bbox.top);
      ctx.lineTo(x, u.bbox.top + u.bbox.height);
      ctx.stroke();
      ctx.font = `${12 * ratio}px system-ui`;
      ctx.textAlign = x > u.bbox.left + u.bbox.width / 2 ? "right" : "left";
      ctx.fillText(text, x + (ctx.textAlign === "right" ? -6 : 6) * ratio, u.bbox.top + 12 * ratio);
      ctx.restore();
    };
  }

  // buckets: {edges, counts}; bucket: (low, high) => text
  function histogram(title, note, buckets, { x, y, format = short, bucket, at, atText }) {
    const { edges, counts } = buckets;
    const data = [edges, [...counts, null]];
    const options = (width) => ({
      width, height: HEIGHT,
      cursor: { y: false, drag: { x: false, y: false } },
      scales: { x: { time: false, range: [edges[0], Math.max(edges[edges.length - 1], at || 0)] }, y: { range: (u, low, high) => [0, Math.max(1, high * 1.08)] } },
      axes: [axis(x, format), axis(y, short, { size: 58 })],
      series: [{ label: x, value: (u, value, series, place) => (place === null || place >= counts.length ? "–" : bucket(edges[place], edges[place + 1])) },
        { label: y, fill: color("accent"), width: 0, points: { show: false }, paths: uPlot.paths.bars({ size: [0.88, Infinity], align: 1 }), value: (u, value) => (value === null ? "–" : Page.count(value)) }],
      hooks: at === undefined ? {} : { draw: [mark(at, atText)] },
    });
    const entries = counts.map((count, place) => ({ count, name: bucket(edges[place], edges[place + 1]) })).filter((one) => one.count);
    return mount(title, note, options, data, () => table(title, [{ title: x, cell: (one) => one.name }, { title: y, number: true, cell: (one) => Page.count(one.count) }], entries));
  }

  // lines: [{label, values, color, dash, width}]; the table shows at most 60 of many points.
  function lines(title, note, xs, series, { x, y, format = short, xFormat = short, low, digits = 4 }) {
    const data = [xs, ...series.map((one) => one.values)];
    const options = (width) => ({
      width, height: HEIGHT,
      cursor: { drag: { x: true, y: false } },
      scales: { x: { time: false }, y: { range: (u, least, most) => spread(least, most, low) } },
      axes: [axis(x, xFormat), axis(y, format, { size: 64 })],
      series: [{ label: x, value: (u, value) => (value === null || value === undefined ? "–" : Page.count(value)) },
        ...series.map((one) => ({ label: one.label, stroke: color(one.color), width: one.width || 1.5, dash: one.dash, spanGaps: true, points: { show: xs.length < 60, size: 5 }, value: (u, value) => (value === null || value === undefined ? "–" : format(value)) }))],
    });
    const every = Math.ceil(xs.length / 60);
    const entries = xs.map((at, place) => ({ at, place })).filter((one) => one.place % every === 0 || one.place === xs.length - 1);
    return mount(title, note, options, data, () => table(title, [{ title: x, cell: (one) => Page.count(one.at) },
      ...series.map((one) => ({ title: one.label, number: true, cell: (entry) => (one.values[entry.place] === null ? "–" : `${+Number(one.values[entry.place]).toPrecision(digits + 1)}`) }))], entries));
  }

  function spread(least, most, low) {
    if (least === null || most === null) return [0, 1];
    const bottom = low === undefined ? least : Math.min(low, least);
    const room = (most - bottom || Math.abs(most) || 1) * 0.06;
    return [bottom === low ? bottom : bottom - room, most + room];
  }

  return { histogram, lines };
})();
