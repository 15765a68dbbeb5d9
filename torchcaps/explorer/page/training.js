// The layer table, the learning curve and the settings of a run.

import { drawing, format, h, s, text } from "./dom.js";

export const trainingPanel = {
  id: "training",
  title: "Layers and training",
  about: "Shapes, parameters, multiply-adds and votes of one image, the memory of a training step, the learning curve, and all settings of the run.",
  wide: true,
  async draw(ctx, run) {
    const training = (ctx.training[run] ??= await ctx.backend.training(run));
    const [head, ...rows] = training.table;
    const mib = (bytes) => `${(bytes / 2 ** 20).toFixed(bytes < 10 * 2 ** 20 ? 1 : 0)} MiB`;
    const { memory } = training;
    return h("div", {},
      h("div", { class: "table" }, h("table", { class: "layers" },
        h("thead", {}, h("tr", {}, head.map((name) => h("th", { scope: "col" }, name)))),
        h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, n) => (n ? h("td", {}, cell) : h("th", { scope: "row" }, cell)))))))),
      h("p", {}, `Memory of a training step with ${memory.batch_size} images: about ${mib(memory.total)} in all; weights ${mib(memory.weights)}, optimiser ${mib(memory.optimizer)}, batch, activations and gradients ${mib(memory.step)}. Votes alone, if they were stored: ${mib(memory.votes)}.`),
      curve(training.curve),
      h("details", { class: "more" }, h("summary", {}, "Settings"), h("pre", { class: "settings" }, lines(training.settings).join("\n"))));
  },
  data: (ctx, run) => ctx.training[run] ?? null,
};

/** Return nested settings as lines "a.b: value". */
function lines(value, prefix = "") {
  if (value === null || typeof value !== "object" || Array.isArray(value)) return [`${prefix}: ${JSON.stringify(value)}`];
  return Object.entries(value).flatMap(([key, item]) => lines(item, prefix ? `${prefix}.${key}` : key));
}

function curve(rows) {
  const series = [["train_accuracy", "training", "c0"], ["val_accuracy", "validation", "c1"]];
  const points = series.map(([key]) => rows.filter((row) => row[key] !== null && row[key] !== undefined).map((row) => [row.epoch ?? 0, row[key]]));
  const all = points.flat();
  if (!all.length) return h("p", { class: "reason" }, "There is no learning curve: the run directory has no metrics yet, or these are pretrained weights.");
  const width = 420;
  const height = 150;
  const right = Math.max(...all.map(([epoch]) => epoch), 1e-9);
  const scale = Math.max(...all.map(([, value]) => value)) > 1.5 ? 1 : 100;
  const low = Math.min(...all.map(([, value]) => value * scale));
  const x = (epoch) => 44 + ((width - 60) * epoch) / right;
  const y = (value) => 14 + (height - 44) * (1 - (value * scale - low) / Math.max(100 - low, 1e-9));
  return drawing(width, height, `Learning curve: ${series.map(([, name], n) => (points[n].length ? `${name} accuracy ${format(points[n].at(-1)[1] * scale, 1)} %` : "")).filter(Boolean).join(", ")}`,
    s("line", { class: "axis", x1: 44, x2: width - 16, y1: height - 30, y2: height - 30 }),
    text(38, 18, "100 %", { class: "tick", "text-anchor": "end" }), text(38, height - 28, format(low, 0), { class: "tick", "text-anchor": "end" }),
    text(width - 16, height - 14, `${right >= 10 || Number.isInteger(right) ? format(right, 0) : format(right, 2)} ${right === 1 ? "epoch" : "epochs"}`, { class: "tick", "text-anchor": "end" }),
    series.map(([, name, color], n) => points[n].length && [
      s("polyline", { class: `line ${color}`, points: points[n].map(([epoch, value]) => `${x(epoch)},${y(value)}`).join(" ") }),
      points[n].map(([epoch, value]) => s("circle", { class: `dot ${color}`, cx: x(epoch), cy: y(value), r: 2.5 })),
      s("rect", { class: `value ${color}`, x: 20 + 126 * n, y: height - 20, width: 8, height: 8 }),
      text(32 + 126 * n, height - 12, `${name} accuracy`, { class: "tick" }),
    ]));
}
