// Convolution maps, and primary capsules in position: length as colour, pose as glyph.

import { decodeArray } from "./arrays.js";
import { MAPS, colorAt, cssColor, drawing, format, h, matrixImage, s, select, text } from "./dom.js";

const WIDTH = 420;

export const primaryPanel = {
  id: "primary",
  title: "Primary capsules",
  about: "One capsule type at every position: the colour is its length, the rays of the glyph are the elements of its pose (outward: positive, hollow end: negative). Point at a capsule for the numbers.",
  needs: "capsules",
  controls(ctx) {
    const choice = select("Type", [[0, "0"]], 0, (value) => ctx.state.set({ type: Number(value) }), "primary-type");
    ctx.onResults(() => {
      const types = ctx.results[0]?.primary?.types ?? 1;
      if (choice.input.options.length !== types) {
        choice.input.replaceChildren(...Array.from({ length: types }, (_, n) => h("option", { value: n }, String(n))));
      }
      choice.input.value = Math.min(ctx.state.get().type, types - 1);
    });
    return [choice];
  },
  draw(ctx, run) {
    const { primary } = ctx.results[run];
    if (!primary) return h("p", { class: "reason" }, "The primary capsules of this network are not on a grid.");
    const [rows, columns] = primary.grid;
    const { types, dim } = primary;
    const type = Math.min(ctx.state.get().type, types - 1);
    primary.decoded ??= { lengths: decodeArray(primary.activation ?? primary.lengths).data, poses: decodeArray(primary.poses).data };
    const { lengths, poses } = primary.decoded;
    const size = Math.min(300 / rows, 300 / columns);
    const highest = lengths.reduce((a, b) => Math.max(a, b), 1e-9);
    const lowest = lengths.reduce((a, b) => Math.min(a, b), highest);
    const scale = (value) => (value - lowest) / Math.max(highest - lowest, 1e-9);
    const largest = poses.reduce((a, b) => Math.max(a, Math.abs(b)), 1e-9);
    const hasPose = type < primary.posed_types;
    const cells = [];
    for (let cell = 0; cell < rows * columns; cell += 1) {
      const x = (cell % columns) * size;
      const y = Math.floor(cell / columns) * size;
      const value = lengths[cell * types + type];
      const pose = hasPose ? poses.slice((cell * primary.posed_types + type) * dim, (cell * primary.posed_types + type + 1) * dim) : [];
      const tip = `row ${Math.floor(cell / columns)}, column ${cell % columns}: ${format(value)}${hasPose ? `; pose ${[...pose].map((v) => format(v, 2)).join(", ")}` : ""}`;
      cells.push(s("g", {}, s("title", {}, tip),
        s("rect", { x, y, width: size - 1, height: size - 1, fill: cssColor(MAPS.viridis, scale(value)) }),
        size >= 14 ? glyph(pose, x + size / 2 - 0.5, y + size / 2 - 0.5, size * 0.46, largest) : null));
    }
    const left = columns * size + 16;
    return h("div", {},
      drawing(WIDTH, rows * size + 4, `Primary capsules of type ${type}, ${rows} by ${columns} positions; largest ${format(highest)}`, cells, typeMap(ctx, lengths, rows, columns, types, type, left, scale), legend(left, lowest, highest, rows * size)),
      drawFeatures(ctx.results[run].features));
  },
  data(ctx, run) {
    const { primary } = ctx.results[run];
    if (!primary) return null;
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
    image.append(s("title", {}, `type ${type}`));
    image.addEventListener("click", () => ctx.state.set({ type }));
    return [image, s("rect", { x: x - 1, y: y - 1, width: size + 2, height: size + 2, class: type === chosen ? "chosen" : "unchosen" })];
  });
}

function legend(left, lowest, highest, bottom) {
  const ramp = matrixImage(Array.from({ length: 40 }, (_, n) => n / 39), 1, 40, [left, bottom - 24, 104, 8], (value) => colorAt(MAPS.viridis, value));
  return [ramp, text(left, bottom - 4, format(lowest, 2), { class: "tick" }), text(left + 104, bottom - 4, format(highest, 2), { class: "tick", "text-anchor": "end" })];
}

function drawFeatures(features) {
  if (!features.length) return null;
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
      image.append(s("title", {}, `channel ${n}`));
      nodes.push(image);
    }
    y += Math.ceil(channels / perRow) * (size + 6) + 4;
  }
  return h("details", { class: "more" }, h("summary", {}, "Convolution maps"), drawing(WIDTH, y, "First channels of the convolutions", nodes));
}
