// Statistics of the test images: confusion matrix, scores, dead capsules, entropy of the couplings.

import { MAPS, cssColor, drawing, format, h, s, selectable, text, withTip } from "./dom.js";
import { shorten } from "./classes.js";
import { sentence } from "./panel.js";

const POLL_MS = 1000;
const WIDTH = 420; // of the confusion matrix with its labels, whatever the number of classes: letters keep their size
const LETTER = 7.4; // width of a letter of a label
const NAME_LENGTH = 18; // letters of a class name

export const statsPanel = {
  id: "stats",
  title: "Test set",
  about: "Rows are labels, columns predictions. Select a cell to see its images in the list of samples.",
  wide: true,
  async draw(ctx, run) {
    const reply = (ctx.statistics[run] ??= await ctx.backend.statistics(run));
    if (!reply.ready) {
      ctx.statistics[run] = null;
      setTimeout(() => ctx.redraw("stats"), POLL_MS);
      return h("p", { class: "reason", role: "status" }, reply.done < reply.total ? `Computing predictions: ${reply.done} of ${reply.total} images.` : "Computing dead capsules and the entropy of the couplings.");
    }
    if (!reply.summary) return h("p", { class: "reason" }, sentence(reply.problem));
    ctx.whenStatisticsReady(run);
    const { summary } = reply;
    const accuracy = `${summary.n_correct} of ${summary.n} test images are classified correctly (${((100 * summary.n_correct) / summary.n).toFixed(2)} %).`;
    return h("div", { class: "split" },
      h("div", {}, h("p", {}, accuracy), summary.confusion ? confusion(ctx, run, summary.confusion.counts) : h("p", { class: "reason" }, "The confusion matrix is shown for up to 200 classes.")),
      h("div", {}, histogram(ctx.info.runs[run].score, summary.histogram), tables(summary)));
  },
  data: (ctx, run) => ctx.statistics[run]?.summary ?? null,
};

function confusion(ctx, run, counts) {
  const { classes } = ctx.info.runs[run];
  const n = counts.length;
  const names = classes.map((name) => shorten(name, NAME_LENGTH));
  const longest = LETTER * Math.max(...names.map((name) => name.length));
  const left = Math.max(60, longest + 12);
  const size = Math.min(60, (WIDTH - left) / n);
  const upright = longest <= size;
  const top = upright ? 18 : longest + 8;
  const off = Math.max(1, ...counts.flatMap((row, i) => row.filter((_, j) => i !== j)));
  const on = Math.max(1, ...counts.map((row, i) => row[i]));
  const cells = counts.flatMap((row, i) => row.map((count, j) => {
    const show = () => ctx.actions.showSamples({ true: i, predicted: j });
    const strength = i === j ? (0.9 * count) / on : 0.25 + (0.75 * count) / off;
    const color = i === j ? cssColor(MAPS.viridis, 0.1 + 0.35 * strength) : cssColor(MAPS.puor, 0.5 + strength / 2);
    const label = `label ${classes[i]}, predicted ${classes[j]}: ${count} images`;
    return withTip(s("g", { class: "cell", "data-count": count, ...(count ? selectable(`cell ${i} ${j}`, label, show) : {}) },
      s("rect", { x: left + j * size, y: top + i * size, width: size - 1, height: size - 1, fill: count ? color : "var(--track)" }),
      size >= 14 && count ? text(left + (j + 0.5) * size, top + (i + 0.62) * size, count, { "text-anchor": "middle", class: i === j || strength > 0.7 ? "on-dark" : "on-light", "font-size": Math.min(11, size / 2.4) }) : null), label);
  }));
  const labels = size < 9 ? [] : names.map((name, i) => {
    const x = left + (i + 0.5) * size;
    return [
      text(left - 6, top + (i + 0.5) * size + 4, name, { "text-anchor": "end", class: "tick" }),
      upright
        ? text(x, 12, name, { "text-anchor": "middle", class: "tick" })
        : text(x + 4, top - 4, name, { class: "tick", transform: `rotate(-90 ${x + 4} ${top - 4})` }),
    ];
  });
  return drawing(WIDTH + 2, top + 2 + n * size, `Confusion matrix of ${n} classes`, cells, labels);
}

function histogram(score, { bins, present, absent }) {
  const width = 380;
  const height = 140;
  const series = [["present", present], ["absent", absent]];
  const bars = series.flatMap(([kind, values], k) => {
    const total = values.reduce((a, b) => a + b, 0) || 1;
    return values.map((value, n) => {
      const size = (height - 54) * Math.sqrt(value / total);
      const step = (width - 40) / bins;
      return withTip(s("rect", { class: `value ${k ? "c1" : "c0"}`, x: 30 + n * step + (k * step) / 2, y: height - 22 - size, width: step / 2 - 0.5, height: size }), `${kind}: ${value} between ${format(n / bins, 2)} and ${format((n + 1) / bins, 2)}`);
    });
  });
  return drawing(width, height + 10, `Histogram of the ${score} of present and absent classes`, bars,
    s("line", { class: "axis", x1: 30, x2: width - 8, y1: height - 22, y2: height - 22 }),
    [0, 0.5, 1].map((value) => text(30 + value * (width - 40), height - 6, value, { class: "tick", "text-anchor": "middle" })),
    s("rect", { class: "value c0", x: 40, y: 4, width: 8, height: 8 }), text(52, 12, `${score} of present classes (root scale)`, { class: "tick" }),
    s("rect", { class: "value c1", x: 40, y: 18, width: 8, height: 8 }), text(52, 26, `${score} of absent classes`, { class: "tick" }));
}

function tables(summary) {
  if (!summary.layers.length && !summary.dead.length) return h("p", { class: "reason" }, summary.why_no_layers);
  const rows = summary.dead.map((layer) => {
    const entropy = summary.layers.find((other) => other.name === layer.name);
    return h("tr", {}, h("th", { scope: "row" }, layer.name),
      h("td", { title: layer.why }, layer.why ? "–" : `${layer.n_dead} of ${layer.n}`),
      h("td", { title: entropy?.why }, entropy?.entropy ? entropy.entropy.map((value) => format(value, 3)).join(" → ") : "–"));
  });
  return h("div", { class: "table" }, h("table", {},
    h("caption", {}, `From ${summary.n_traced} images`),
    h("thead", {}, h("tr", {}, ["layer", "dead capsules", "coupling entropy by iteration"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, rows)));
}
