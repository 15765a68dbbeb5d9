// Convolution maps, and primary capsules in position: length as colour, pose as glyph.

import { decodeArray } from "./arrays.js";
import { MAPS, colorAt, cssColor, drawing, format, h, matrixImage, s, select, selectable, text, withCellTips, withTip } from "./dom.js";

const WIDTH = 420;

export const primaryPanel = {
  id: "primary",
  title: "Primary capsules",
  about: "One capsule type at every position, or all types if there is one position: the colour is the length, the rays of the glyph are the elements of its pose (outward: positive, hollow end: negative). Point at a capsule for the numbers.",
  controls(ctx) {
    const choice = select("Type", [[0, "0"]], 0, (value) => ctx.state.set({ type: Number(value) }), "primary-type");
    ctx.onResults(() => {
      const grids = ctx.results.map((result) => result.primary).filter((primary) => primary && primary.grid[0] * primary.grid[1] > 1);
      const types = Math.max(1, ...grids.map((primary) => primary.types));
      choice.classList.toggle("hidden", !grids.length);
      if (choice.input.options.length !== types) {
        choice.input.replaceChildren(...Array.from({ length: types }, (_, n) => h("option", { value: n }, String(n))));
      }
      choice.input.value = Math.min(ctx.state.get().type, types - 1);
    });
    return [choice];
  },
  draw(ctx, run) {
    const { primary } = ctx.results[run];
    if (!primary) {
      const reason = ctx.info.runs[run].missing.capsules ?? "The primary capsules of this network are not on a grid.";
      return h("div", {}, h("p", { class: "reason" }, reason), drawFeatures(ctx.results[run].features));
    }
    const [rows, columns] = primary.grid;
    const { types, dim } = primary;
    const type = Math.min(ctx.state.get().type, types - 1);
    primary.decoded ??= { lengths: decodeArray(primary.activation ?? primary.lengths).data, poses: decodeArray(primary.poses).data };
    const { lengths, poses } = primary.decoded;
    const single = rows * columns === 1; // then the cells are the types
    const across = single ? Math.ceil(Math.sqrt(types)) : columns;
    const count = single ? types : rows * columns;
    const size = Math.min(300 / Math.ceil(count / across), 300 / across);
    const highest = lengths.reduce((a, b) => Math.max(a, b), 1e-9);
    const lowest = lengths.reduce((a, b) => Math.min(a, b), highest);
    const flat = highest - lowest < 1e-5 * Math.abs(highest); // rounding errors
    const scale = (value) => (flat ? 0.5 : (value - lowest) / (highest - lowest));
    const largest = poses.reduce((a, b) => Math.max(a, Math.abs(b)), 1e-9);
    const cells = Array.from({ length: count }, (_, n) => {
      const x = (n % across) * size;
      const y = Math.floor(n / across) * size;
      const [cell, kind] = single ? [0, n] : [n, type];
      const value = lengths[cell * types + kind];
      const start = (cell * primary.posed_types + kind) * dim;
      const pose = kind < primary.posed_types ? poses.slice(start, start + dim) : [];
      const name = single ? `type ${n}` : `row ${Math.floor(n / columns)}, column ${n % columns}`;
      return withTip(s("g", {},
        s("rect", { x, y, width: size - 1, height: size - 1, fill: cssColor(MAPS.viridis, scale(value)) }),
        size >= 14 ? glyph(pose, x + size / 2 - 0.5, y + size / 2 - 0.5, size * 0.46, largest) : null),
      `${name}: ${format(value, 4)}${pose.length ? `; pose ${[...pose].map((v) => format(v, 2)).join(", ")}` : ""}`);
    });
    const left = across * size + 16;
    const height = Math.max(Math.ceil(count / across) * size, single ? 0 : Math.ceil(Math.min(types, 24) / 3) * 36 + 44);
    const shown = single ? `${types} types at one position` : `type ${type}, ${rows} by ${columns} positions`;
    return h("div", {},
      drawing(WIDTH, height + 4, `Primary capsules: ${shown}; largest ${format(highest)}`, cells,
        single ? null : typeMap(ctx, lengths, rows, columns, types, type, left, scale), flat ? null : legend(left, lowest, highest, height)),
      flat ? h("p", { class: "reason" }, `All lengths are ${format(highest)}.`) : null,
      drawFeatures(ctx.results[run].features));
  },
  data(ctx, run) {
    const { primary } = ctx.results[run];
    if (!primary) return { features: ctx.results[run].features.map(({ name, shape, low, high }) => ({ name, shape, low, high })) };
    return { grid: primary.grid, types: primary.types, dim: primary.dim, lengths: [...decodeArray(primary.lengths).data], poses: [...decodeArray(primary.poses).data] };
  },
};

/** Return rays from the centre of a cell, one per element of the pose. */
function glyph(pose, x, y, radius, largest) {
  return [...pose].map((value, n) => {
    const angle = (2 * Math.PI * n) / pose.length - Math.PI / 2;
    const length = radius * Math.min(1, Math.abs(value) / largest);
    const end = [x + length * Math.cos(angle), y + length * Math.sin(angle)];
    return [
      s("line", { x1: x, y1: y, x2: end[0], y2: end[1], class: "ray" }),
      value < 0 && length > 2 ? s("circle", { cx: end[0], cy: end[1], r: 1.3, class: "ray-end" }) : null,
    ];
  });
}

/** Return small maps of the other types, to choose from. */
function typeMap(ctx, lengths, rows, columns, types, chosen, left, scale) {
  const perRow = 3;
  const size = 32;
  return Array.from({ length: Math.min(types, 24) }, (_, type) => {
    const values = Array.from({ length: rows * columns }, (_, cell) => lengths[cell * types + type]);
    const x = left + (type % perRow) * (size + 4);
    const y = Math.floor(type / perRow) * (size + 4);
    const image = matrixImage(values, rows, columns, [x, y, size, size], (value) => colorAt(MAPS.viridis, scale(value)));
    return [withTip(s("g", { class: "cell", ...selectable(`type ${type}`, `type ${type}`, () => ctx.state.set({ type }), type === chosen) }, image), `type ${type}`), s("rect", { x: x - 1, y: y - 1, width: size + 2, height: size + 2, class: type === chosen ? "chosen" : "unchosen" })];
  });
}

function legend(left, lowest, highest, bottom) {
  const ramp = matrixImage(Array.from({ length: 40 }, (_, n) => n / 39), 1, 40, [left, bottom - 24, 104, 8], (value) => colorAt(MAPS.viridis, value));
  const digits = Math.min(6, Math.max(2, 1 - Math.floor(Math.log10(highest - lowest))));
  return [ramp, text(left, bottom - 4, format(lowest, digits), { class: "tick" }), text(left + 104, bottom - 4, format(highest, digits), { class: "tick", "text-anchor": "end" })];
}

let featuresOpen = false; // images of channels are drawn only if somebody looks at them

function drawFeatures(features) {
  if (!features.length) return null;
  const summary = h("summary", {}, "Convolution maps");
  const root = h("details", { class: "more", open: featuresOpen }, summary, featuresOpen ? drawMaps(features) : null);
  root.addEventListener("toggle", () => {
    featuresOpen = root.open;
    if (root.open && root.children.length === 1) root.append(drawMaps(features));
  });
  return root;
}

function drawMaps(features) {
  const size = 46;
  const perRow = 8;
  let y = 0;
  const nodes = [];
  for (const feature of features.slice(0, 4)) {
    const { data, shape: [channels, rows, columns] } = decodeArray(feature.maps);
    nodes.push(text(0, y + 12, `${feature.name}: ${feature.shape.join(" × ")}, values ${format(feature.low, 2)} to ${format(feature.high, 2)}`, { class: "tick" }));
    y += 18;
    for (let n = 0; n < channels; n += 1) {
      const values = data.slice(n * rows * columns, (n + 1) * rows * columns);
      const box = [(n % perRow) * (size + 6), y + Math.floor(n / perRow) * (size + 6), size, size];
      const image = matrixImage(values, rows, columns, box, (value) => colorAt(MAPS.viridis, value / 255));
      nodes.push(withCellTips(image, rows, columns, (row, column) =>
        `channel ${n}, row ${row}, column ${column}: ${format(feature.low + ((feature.high - feature.low) * values[row * columns + column]) / 255)}`));
    }
    y += Math.ceil(channels / perRow) * (size + 6) + 4;
  }
  return drawing(WIDTH, y, "First channels of the convolutions", nodes);
}
