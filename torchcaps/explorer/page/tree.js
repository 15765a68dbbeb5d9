// The strongest connections from child to parent over the image: a parse tree.

import { decodeArray } from "./arrays.js";
import { drawing, format, h, photo, s, selectable, slider, text } from "./dom.js";
import { shorten, targetOf } from "./classes.js";

const WIDTH = 420;
const MAX_CLASSES = 10;
const NODE_X = WIDTH - 118;
const MAX_OPAQUE = 30; // lines of a layer

export const treePanel = {
  id: "tree",
  title: "Parse tree",
  about: "The connections with the largest coupling × activity of the child in the last iteration. A dot is the centre of a child's receptive field, the types of one position around it. Orange leads to the chosen class, grey to others; dashed is negative. Lower the threshold to see more.",
  needs: "capsules",
  controls(ctx) {
    const threshold = slider("Threshold", { min: 0, max: 1, step: 0.01, value: ctx.state.get().threshold, id: "threshold", change: (value) => ctx.state.set({ threshold: value }) });
    ctx.onResults(() => threshold.set(ctx.state.get().threshold));
    return [threshold];
  },
  draw(ctx, run) {
    const result = ctx.results[run];
    const info = ctx.info.runs[run];
    const { layers } = result;
    if (layers.some((layer) => layer.why)) return h("p", { class: "reason" }, layers.find((layer) => layer.why).why);
    const plane = Math.min(230, (NODE_X - 20) / layers.length - 14);
    const height = Math.max(plane + 16, 250);
    const top = (height - plane) / 2;
    const image = decodeArray(result.image);
    const boxes = layers.map((_, n) => [n * (plane + 18), top, plane]);
    const nodes = classNodes(result.order.slice(0, MAX_CLASSES), height);
    const threshold = ctx.state.get().threshold;
    const target = targetOf(ctx, run);
    const drawn = drawLayers(layers, boxes, nodes, threshold, result.image.shape, target);
    const labels = [...nodes].map(([index, y]) => [
      s("circle", {
        cx: NODE_X, cy: y, r: 4 + 7 * Math.min(1, Math.max(0, result.probabilities[index])), class: `node${index === target ? " target" : ""}`,
        ...selectable(`class ${index}`, `class ${info.classes[index]}`, () => ctx.state.set({ target: index, offsets: {} }), index === target),
      }),
      text(NODE_X + 16, y + 4, `${shorten(info.classes[index], 8)} ${format(result.probabilities[index], 2)}`, { class: "name" }),
    ]);
    const planes = boxes.slice(1).map(([x, y, size], n) => [
      s("rect", { x, y, width: size, height: size, class: "plane" }),
      text(x + size / 2, y + size + 14, layers[n].name, { class: "tick", "text-anchor": "middle" }),
    ]);
    const count = drawn.reduce((sum, { n }) => sum + n, 0);
    return drawing(WIDTH, height + 20, `Parse tree with ${count} connections`, photo(image.data, image.shape, [0, top, plane, plane]), planes, drawn.map(({ node }) => node), labels);
  },
  data: (ctx, run) => ctx.results[run].layers.map(({ name, edges, centers, sites }) => ({ layer: name, columns: ["child", "site", "parent", "weight"], edges, centers, sites })),
};

/** Return the vertical position of each class. */
function classNodes(classes, height) {
  const step = Math.min(26, (height - 20) / Math.max(classes.length, 1));
  const start = height / 2 - (step * (classes.length - 1)) / 2;
  return new Map(classes.map((index, n) => [index, start + step * n]));
}

/** Draw the connections of all layers, from the classes down: those of the target's tree above the others. */
function drawLayers(layers, boxes, nodes, threshold, imageShape, target) {
  const drawn = [];
  let isInTree = (edge) => edge[2] === target;
  for (let n = layers.length - 1; n >= 0; n -= 1) {
    drawn[n] = drawEdges(layers, n, boxes, nodes, threshold, imageShape, isInTree);
    const { by_type: byType, types } = layers[n];
    const { tree } = drawn[n];
    isInTree = ([, site, parent]) => tree.has(byType ? parent : site * types + parent);
  }
  return drawn;
}

function drawEdges(layers, n, boxes, nodes, threshold, imageShape, isInTree) {
  const layer = layers[n];
  const last = n === layers.length - 1;
  const strongest = Math.max(...layer.edges.map((edge) => Math.abs(edge[3])), 1e-12);
  const shown = layer.edges.filter((edge) => Math.abs(edge[3]) / strongest >= threshold);
  const density = Math.min(1, Math.sqrt(MAX_OPAQUE / Math.max(shown.length, 1))); // many lines are thin
  const groups = [s("g", { class: "edges" }), s("g", { class: "edges" })]; // of other classes, of the tree
  const dots = new Map();
  const tree = new Set();
  let count = 0;
  for (const edge of shown) {
    const [child, site, parent, weight] = edge;
    const fraction = Math.abs(weight) / strongest;
    const kind = isInTree(edge) ? "" : " other";
    const from = childPoint(layer, child, boxes[n], imageShape, n === 0);
    const to = last ? [NODE_X, nodes.get(parent)] : childPoint(layers[n + 1], site * layers[n + 1].types + parent, boxes[n + 1], imageShape, false);
    if (to[1] === undefined) continue; // a class that is not shown
    const middle = (from[0] + to[0]) / 2;
    groups[kind ? 0 : 1].append(s("path", {
      d: `M${from[0]},${from[1]} C${middle},${from[1]} ${middle},${to[1]} ${to[0]},${to[1]}`,
      class: `edge${weight < 0 ? " negative" : ""}${kind}`, "stroke-width": (0.6 + 2.4 * fraction) * density, "stroke-opacity": (0.2 + 0.6 * fraction) * (kind ? density : 1),
    }));
    if (!kind) tree.add(child);
    dots.set(child, from);
    count += 1;
  }
  for (const [child, [x, y]] of dots) groups[tree.has(child) ? 1 : 0].append(s("circle", { cx: x, cy: y, r: 2.4, class: tree.has(child) ? "child" : "child other" }));
  return { node: groups, n: count, tree };
}

/** Return the position of a child: the centre of its receptive field on the image, or its cell on a plane. */
function childPoint(layer, child, [left, top, size], [, height, width], onImage) {
  if (!layer.grid || layer.by_type) return [left + size / 2, top + ((child + 0.5) / Math.max(layer.types, 1)) * size];
  const [rows, columns] = layer.grid;
  const cell = Math.floor(child / layer.types);
  const row = Math.floor(cell / columns);
  const column = cell % columns;
  // Types of one position are drawn on a circle around it, a wide one if there is no other position.
  const angle = (2 * Math.PI * (child % layer.types)) / layer.types;
  const spread = layer.types === 1 ? 0 : rows * columns === 1 ? size / 4 : Math.min(4, size / columns / 4);
  let x = (column + 0.5) / columns;
  let y = (row + 0.5) / rows;
  if (onImage && layer.centers.length) {
    const [firstRow, rowStep, firstColumn, columnStep] = layer.centers;
    x = (firstColumn + columnStep * column + 0.5) / width;
    y = (firstRow + rowStep * row + 0.5) / height;
  }
  return [left + x * size + spread * Math.cos(angle), top + y * size + spread * Math.sin(angle)];
}
