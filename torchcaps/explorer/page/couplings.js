// Couplings of every iteration: maps by parent or the whole matrix, with entropy and sums.

import { decodeArray } from "./arrays.js";
import { MAPS, button, colorAt, drawing, format, h, matrixImage, s, select, selectable, slider, text, withCellTips, withTip } from "./dom.js";
import { shorten, targetOf } from "./classes.js";

const WIDTH = 420;
const MAX_MAPS = 20;
const MAX_SITES = 1024;

/** Return the layer that the page shows, with decoded arrays, or null. */
export function shownLayer(ctx, run) {
  const { layers } = ctx.results[run];
  if (!layers.length) return null;
  const chosen = ctx.state.get().layer;
  const index = chosen === null ? layers.length - 1 : Math.min(chosen, layers.length - 1);
  const layer = layers[index];
  if (layer.why) return { index, layer };
  layer.decoded ??= {
    couplings: decodeArray(layer.couplings), children: decodeArray(layer.children), activity: decodeArray(layer.activity),
  };
  return { index, layer, ...layer.decoded, last: index === layers.length - 1 };
}

/** Return the iteration that the page shows. */
export function shownIteration(ctx, layer) {
  const { t } = ctx.state.get();
  return t === null ? layer.iterations - 1 : Math.min(t, layer.iterations - 1);
}

/** Return the name of a parent: its class in the last layer, its index elsewhere. */
export const parentName = (ctx, run, shown, parent) =>
  shown.last ? ctx.info.runs[run].classes[parent] : `type ${parent}`;

/** Return the parent whose numbers the page shows: the chosen class in the last layer. */
export function shownParent(ctx, run, shown) {
  return shown.last ? targetOf(ctx, run) : Math.min(ctx.state.get().parent, shown.layer.parents - 1);
}

/** Return the state that selects a parent. */
export const parentState = (shown, parent) => (shown.last ? { target: parent, offsets: {} } : { parent });

/** Return the run that the controls follow: the first one with capsules, since a network without has no layers. */
export const leadOf = (ctx) => Math.max(0, ctx.info.runs.findIndex((run) => run.layers.length));

let timer = 0;

export const couplingsPanel = {
  id: "couplings",
  title: "Couplings",
  about: "How strongly each child is coupled to each parent, by the position of the child. White is the uniform coupling (0 or the mean if couplings are not normalised), orange is above, purple below. Step through the iterations and watch the agreement form; select a parent to see its numbers in the equation.",
  needs: "capsules",
  controls(ctx) {
    const lead = leadOf(ctx);
    const { layers } = ctx.info.runs[lead];
    const position = slider("Iteration", { min: 1, max: 1, step: 1, value: 1, id: "iteration", change: (value) => ctx.state.set({ t: value - 1 }) });
    const play = button("Play", () => toggle(), { id: "play-iterations", "aria-pressed": "false" });
    const stepsOf = (run) => (ctx.results[run] && shownLayer(ctx, run)?.layer.iterations) || 1;
    const steps = () => Math.max(...ctx.info.runs.map((_, run) => stepsOf(run)));
    const move = (by) => {
      const now = ctx.state.get().t ?? steps() - 1;
      ctx.state.set({ t: (now + by + steps()) % steps() });
    };
    function toggle() {
      if (timer) {
        clearInterval(timer);
        timer = 0;
      } else {
        ctx.state.set({ t: 0 });
        timer = setInterval(() => move(1), 900);
      }
      play.textContent = timer ? "Pause" : "Play";
      play.setAttribute("aria-pressed", String(Boolean(timer)));
    }
    ctx.actions.step = move;
    ctx.actions.play = toggle;
    ctx.onResults(() => {
      const input = position.querySelector("input");
      input.max = steps();
      position.set((ctx.state.get().t ?? steps() - 1) + 1);
      const single = steps() === 1;
      for (const control of [position, play]) control.classList.toggle("hidden", single);
    });
    const chooseLayer = layers.length > 1 && select("Layer", layers.map((layer, n) => [n, layer.name]), ctx.state.get().layer ?? layers.length - 1,
      (value) => ctx.state.set({ layer: Number(value), site: null, parent: 0 }), "layer");
    if (chooseLayer) ctx.onResults(() => { chooseLayer.input.value = Math.min(ctx.state.get().layer ?? layers.length - 1, layers.length - 1); });
    const position2d = select("Parents at", [], "", (value) => ctx.state.set({ site: value.split(",").map(Number) }), "site");
    ctx.onResults(() => {
      const layer = shownLayer(ctx, lead)?.layer;
      const [rows, columns] = layer?.sites ?? [];
      const several = rows * columns > 1 && rows * columns <= MAX_SITES;
      position2d.classList.toggle("hidden", !several);
      if (!several) return;
      const sites = Array.from({ length: rows * columns }, (_, n) => [Math.floor(n / columns), n % columns]);
      position2d.input.replaceChildren(...sites.map(([row, column]) => h("option", { value: `${row},${column}` }, `row ${row}, column ${column}`)));
      position2d.input.value = layer.site.join(",");
    });
    const view = select("View", [["maps", "maps by parent"], ["matrix", "matrix"]], ctx.state.get().view,
      (value) => ctx.state.set({ view: value }), "coupling-view");
    ctx.onResults(() => {
      view.input.value = ctx.state.get().view;
      const shown = ctx.info.runs.map((_, run) => shownLayer(ctx, run)?.layer);
      view.classList.toggle("hidden", !shown.some((layer) => layer && !layer.why && hasMaps(layer)));
    });
    return [chooseLayer || null, position2d, view, position, play];
  },
  draw(ctx, run) {
    const shown = shownLayer(ctx, run);
    if (!shown) return h("p", { class: "reason" }, "This network has no capsule layers.");
    if (shown.layer.why) return h("p", { class: "reason" }, shown.layer.why);
    const root = h("div", {});
    const maps = ctx.state.get().view === "maps" && hasMaps(shown.layer);
    root.append(maps ? drawMaps(ctx, run, shown) : drawMatrix(ctx, run, shown), drawEntropy(shown.layer, shownIteration(ctx, shown.layer)));
    return root;
  },
  data(ctx, run) {
    const shown = shownLayer(ctx, run);
    const { layer } = shown;
    return {
      layer: layer.name, routing: ctx.info.runs[run].layers[shown.index].routing, site: layer.site, shape: shown.couplings.shape,
      axes: ["iteration", "child", "parent"], couplings: [...shown.couplings.data], children: [...shown.children.data],
      entropy: layer.entropy, sums: layer.sums,
    };
  },
};

const positionsOf = (layer) => (layer.grid ? layer.grid[0] * layer.grid[1] : 1);

/** Whether the children have positions on which couplings can be drawn as maps. */
const hasMaps = (layer) => !layer.by_type && positionsOf(layer) > 1;

/** Return a function from a coupling to its colour, centred on the uniform coupling, and the range of the legend. */
function scaleOf(shown, values) {
  const [, children, parents] = shown.couplings.shape;
  const { axis, types, merged_types: merged } = shown.layer;
  const finite = values.filter(Number.isFinite);
  const lowest = finite.reduce((a, b) => Math.min(a, b), Infinity);
  const normalized = axis === "parents" || axis === "children";
  const mean = !normalized && lowest > 0 ? finite.reduce((a, b) => a + b, 0) / finite.length : 0;
  const uniform = (axis === "parents" ? 1 / parents : 1 / children) * (merged ? types : 1);
  const center = normalized ? uniform : mean;
  const range = finite.reduce((most, value) => Math.max(most, Math.abs(value - center)), 1e-9);
  const name = normalized ? "uniform" : mean ? "mean" : "";
  return { center, name, range, color: (value) => (Number.isFinite(value) ? colorAt(MAPS.puor, 0.5 + (value - center) / (2 * range)) : [128, 128, 128, 60]) };
}

/** Return the mean coupling of the children at each position of the grid to each parent: [T][J][H * W]. */
function positionMeans(shown) {
  const [steps, children, parents] = shown.couplings.shape;
  const [rows, columns] = shown.layer.grid;
  const types = shown.layer.types;
  const means = [];
  for (let t = 0; t < steps; t += 1) {
    const sums = Array.from({ length: parents }, () => new Float64Array(rows * columns));
    const counts = new Float64Array(rows * columns);
    for (let i = 0; i < children; i += 1) {
      if (shown.children.data[i] < 0) continue;
      const cell = Math.floor(shown.children.data[i] / types);
      counts[cell] += 1;
      for (let j = 0; j < parents; j += 1) sums[j][cell] += shown.couplings.data[(t * children + i) * parents + j];
    }
    means.push(sums.map((sum) => Array.from(sum, (value, cell) => (counts[cell] ? value / counts[cell] : NaN))));
  }
  return means;
}

function drawMaps(ctx, run, shown) {
  const { layer } = shown;
  const means = (shown.means ??= layer.decoded.means ??= positionMeans(shown));
  const t = shownIteration(ctx, layer);
  const { center, name: centerName, range, color } = scaleOf(shown, means.flat(2));
  const [rows, columns] = layer.grid;
  const parents = Math.min(layer.parents, MAX_MAPS);
  const perRow = parents <= 5 ? parents : 5;
  const size = Math.min(74, WIDTH / perRow - 10);
  const order = shown.last ? ctx.results[run].order : [...Array(layer.parents).keys()];
  const chosen = shownParent(ctx, run, shown);
  const cells = order.slice(0, parents).map((parent, n) => {
    const x = (n % perRow) * (WIDTH / perRow) + (WIDTH / perRow - size) / 2;
    const y = Math.floor(n / perRow) * (size + 24) + 16;
    const name = shorten(parentName(ctx, run, shown, parent), 6);
    const activity = shown.activity.data[t * layer.parents + parent];
    const box = [x, y, size, size * (rows / columns)];
    const values = means[t][parent];
    const image = withCellTips(matrixImage(values, rows, columns, box, color), rows, columns, (row, column) =>
      `${parentName(ctx, run, shown, parent)}, row ${row}, column ${column}: coupling ${format(values[row * columns + column], 4)}`);
    const finite = values.filter(Number.isFinite);
    const label = `${name}: activity ${format(activity)}; couplings ${format(Math.min(...finite))} to ${format(Math.max(...finite))}`;
    return [
      s("g", { class: "cell", ...selectable(`parent ${parent}`, label, () => ctx.state.set(parentState(shown, parent)), parent === chosen) },
        image, frame(box, parent === chosen)),
      text(x, y - 4, name, { class: "name" }), text(x + size, y - 4, format(activity, 2), { class: "tick", "text-anchor": "end" }),
    ];
  });
  const height = Math.ceil(parents / perRow) * (size + 24) + 36;
  const label = `Couplings of layer ${layer.name} after iteration ${t + 1} of ${layer.iterations}, from ${format(center - range)} to ${format(center + range)}`;
  return drawing(WIDTH, height, label, cells, legend(center, centerName, range, height - 22));
}

function drawMatrix(ctx, run, shown) {
  const { layer } = shown;
  const [, children, parents] = shown.couplings.shape;
  const t = shownIteration(ctx, layer);
  const { center, name: centerName, range, color } = scaleOf(shown, shown.couplings.data);
  const shownParents = Math.min(parents, 40);
  const order = shown.last ? ctx.results[run].order : [...Array(parents).keys()];
  const row = Math.max(6, Math.min(20, 240 / shownParents));
  const left = 64;
  const values = new Float32Array(shownParents * children);
  order.slice(0, shownParents).forEach((parent, n) => {
    for (let i = 0; i < children; i += 1) values[n * children + i] = shown.couplings.data[(t * children + i) * parents + parent];
  });
  const image = withCellTips(matrixImage(values, shownParents, children, [left, 4, WIDTH - left, row * shownParents], color), shownParents, children, (n, i) =>
    `child ${shown.children.data[i]} to ${parentName(ctx, run, shown, order[n])}: coupling ${format(values[n * children + i], 4)}`);
  const chosen = shownParent(ctx, run, shown);
  const rows = order.slice(0, shownParents).map((parent, n) =>
    s("g", { class: "cell", ...selectable(`parent ${parent}`, `parent ${parentName(ctx, run, shown, parent)}`, () => ctx.state.set(parentState(shown, parent)), parent === chosen) },
      withTip(s("rect", { x: 0, y: 4 + row * n, width: left - 2, height: row, class: "hit" }), "Select this parent"),
      frame([left, 4 + row * n, WIDTH - left, row], parent === chosen)));
  const names = row < 9 ? [] : order.slice(0, shownParents).map((parent, n) =>
    text(left - 6, 4 + row * n + row / 2 + 4, shorten(parentName(ctx, run, shown, parent), 9), { "text-anchor": "end", class: "name" }));
  const height = row * shownParents + 52;
  const what = layer.by_type ? "child types" : layer.merged_types ? "child positions" : positionsOf(layer) > 1 ? `children by position, ${layer.types} types each` : "children";
  return drawing(WIDTH, height, `Coupling matrix of layer ${layer.name}, iteration ${t + 1}: ${parents} parents, ${children} children`,
    image, names, rows, text((WIDTH + left) / 2, height - 32, `${children} ${what}`, { class: "tick", "text-anchor": "middle" }),
    legend(center, centerName, range, height - 22));
}

const frame = ([x, y, width, height], isChosen) => s("rect", { x: x - 1, y: y - 1, width: width + 2, height: height + 2, class: isChosen ? "chosen" : "unchosen" });

function legend(center, name, range, y) {
  // Normalised couplings are not negative: the scale is symmetric about the uniform coupling, its legend starts at 0.
  const low = center ? Math.max(0, center - range) : -range;
  const start = 0.5 + (low - center) / (2 * range);
  const digits = Math.min(6, Math.max(3, 1 - Math.floor(Math.log10(range))));
  const ramp = matrixImage(Array.from({ length: 60 }, (_, i) => start + ((1 - start) * i) / 59), 1, 60, [WIDTH / 2 - 90, y + 4, 180, 8], (value) => colorAt(MAPS.puor, value));
  return [
    ramp,
    text(WIDTH / 2 - 96, y + 12, format(low, digits), { "text-anchor": "end", class: "tick" }),
    text(WIDTH / 2 + 96, y + 12, format(center + range, digits), { class: "tick" }),
    text(WIDTH / 2 - 90 + (180 * (center - low)) / (center + range - low), y + 24, name ? `${name} ${format(center, digits)}` : "0", { "text-anchor": "middle", class: "tick" }),
  ];
}

/** Return the table of entropy and sums over the parents by iteration. */
function drawEntropy(layer, t) {
  const rows = layer.sums.map(([low, mean, high], n) =>
    h("tr", { class: n === t ? "current" : null, "data-iteration": n },
      h("th", { scope: "row" }, n + 1),
      h("td", { "data-entropy": layer.entropy?.[n]?.toFixed(6) }, layer.entropy ? format(layer.entropy[n], 4) : "–"),
      h("td", {}, `${format(mean)} (${format(low)} to ${format(high)})`),
      h("td", { "data-residual": layer.residual[n]?.toFixed(6) }, layer.residual[n] === null ? "–" : format(layer.residual[n], 4))));
  return h("div", { class: "table" },
    h("table", {},
      h("thead", {}, h("tr", {}, ["iteration", "entropy", "sum over parents", "change of parents"].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, rows)),
    layer.why_no_entropy ? h("p", { class: "reason" }, `Entropy: ${layer.why_no_entropy}.`) : null);
}
