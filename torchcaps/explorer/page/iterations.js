// The number of routing iterations: parents and their change by iteration.

import { drawing, format, h, s, slider, text } from "./dom.js";
import { parentName, shownIteration, shownLayer } from "./couplings.js";
import { shorten } from "./classes.js";

const WIDTH = 420;
const HEIGHT = 190;
const COLORS = ["c0", "c1", "c2", "c3", "c4"];

export const iterationsPanel = {
  id: "iterations",
  title: "Routing iterations",
  about: "Route longer or shorter than the network was trained with. Lines are the activities of the strongest parents after each iteration; the residual is the relative change of all parents.",
  needs: "iterations",
  controls(ctx) {
    if (ctx.backend.isFile) return [];
    const trained = Math.max(...ctx.info.runs.flatMap((run) => run.layers.map((layer) => layer.iterations)), 1);
    const count = slider("Iterations", { min: 1, max: 10, step: 1, value: ctx.state.get().iterations ?? trained, id: "iterations",
      change: (value) => ctx.state.set({ iterations: value, t: null }) });
    ctx.onResults(() => count.set(ctx.state.get().iterations ?? trained));
    const reset = h("button", { type: "button", onclick: () => ctx.state.set({ iterations: null, t: null }) }, `As trained (${trained})`);
    return [count, reset];
  },
  draw(ctx, run) {
    const shown = shownLayer(ctx, run);
    const { layer } = shown;
    const steps = layer.iterations;
    const t = shownIteration(ctx, layer);
    const values = (parent) => Array.from({ length: steps }, (_, n) => shown.activity.data[n * layer.parents + parent]);
    const order = [...Array(layer.parents).keys()].sort((a, b) => values(b).at(-1) - values(a).at(-1)).slice(0, 5);
    const all = order.flatMap(values);
    const high = Math.max(...all, 1e-9) * 1.05;
    const low = Math.min(0, ...all);
    const x = (n) => 46 + (steps > 1 ? (n / (steps - 1)) * 250 : 125);
    const y = (value) => 12 + (HEIGHT - 60) * (1 - (value - low) / (high - low));
    const lines = order.map((parent, n) => [
      s("polyline", { class: `line ${COLORS[n]}`, points: values(parent).map((value, i) => `${x(i)},${y(value)}`).join(" ") }),
      values(parent).map((value, i) => s("circle", { class: `dot ${COLORS[n]}`, cx: x(i), cy: y(value), r: 3 })),
      text(WIDTH - 92, 22 + 18 * n, `${shorten(parentName(ctx, run, shown, parent), 8)} ${format(values(parent)[t], 3)}`, { class: `name ${COLORS[n]}-text` }),
      s("rect", { class: `value ${COLORS[n]}`, x: WIDTH - 106, y: 14 + 18 * n, width: 8, height: 8 }),
    ]);
    const ticks = Array.from({ length: steps }, (_, n) => [
      text(x(n), HEIGHT - 30, n + 1, { class: "tick", "text-anchor": "middle" }),
      layer.residual[n] === null ? null : text(x(n), HEIGHT - 12, format(layer.residual[n], 2), { class: "tick", "text-anchor": "middle" }),
    ]);
    return drawing(WIDTH, HEIGHT, `Activity of the strongest parents over ${steps} iterations; last residual ${format(layer.residual.at(-1))}`,
      s("line", { class: "margin", x1: x(t), x2: x(t), y1: 8, y2: HEIGHT - 44 }),
      s("line", { class: "axis", x1: 46, x2: 302, y1: HEIGHT - 46, y2: HEIGHT - 46 }),
      text(40, y(high / 1.05) + 4, format(high / 1.05, 2), { class: "tick", "text-anchor": "end" }),
      text(40, HEIGHT - 44, format(low, 0), { class: "tick", "text-anchor": "end" }),
      lines, ticks,
      steps > 1 ? text(WIDTH - 6, HEIGHT - 12, "residual", { class: "tick", "text-anchor": "end" }) : null,
      text(WIDTH - 6, HEIGHT - 30, "iteration", { class: "tick", "text-anchor": "end" }));
  },
  data(ctx, run) {
    const shown = shownLayer(ctx, run);
    return { layer: shown.layer.name, shape: shown.activity.shape, axes: ["iteration", "parent"], activity: [...shown.activity.data], residual: shown.layer.residual };
  },
};
