// Elements of HTML and SVG, number formats and colour maps.

const SVG = "http://www.w3.org/2000/svg";

/** Create an HTML element: attributes, "on..." listeners, text or nodes as children. */
export function h(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** Create an SVG element. */
export function s(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat(3)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child.nodeType ? child : String(child));
  }
  return element;
}

/** Create the root of a drawing with a text alternative. */
export function drawing(width, height, label, ...children) {
  const root = s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, class: "drawing" });
  root.append(...children.flat(3).filter(Boolean));
  return root;
}

export const text = (x, y, content, attributes = {}) => s("text", { x, y, ...attributes }, content);

/** Format a number for people: three digits after the point, or an exponent. */
export function format(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 10 ** -digits || size >= 1e5)) return value.toExponential(1).replaceAll("-", "−");
  return value.toFixed(digits).replace("-", "−");
}

// Colour maps -----------------------------------------------------------------------------------------------

// Viridis (sequential) and PuOr (diverging): both are readable with any kind of colour blindness.
const VIRIDIS = [
  [68, 1, 84], [72, 40, 120], [62, 74, 137], [49, 104, 142], [38, 130, 142],
  [31, 158, 137], [53, 183, 121], [109, 205, 89], [180, 222, 44], [253, 231, 37],
];
const PUOR = [
  [84, 39, 136], [128, 115, 172], [178, 171, 210], [216, 218, 235], [247, 247, 247],
  [254, 224, 182], [253, 184, 99], [224, 130, 20], [179, 88, 6],
];
const GRAY = [[0, 0, 0], [255, 255, 255]];
export const MAPS = { viridis: VIRIDIS, puor: PUOR, gray: GRAY };
export const TWO_COLORS = [[230, 159, 0], [86, 180, 233]]; // orange and sky blue of Okabe and Ito

/** Return the colour [r, g, b] of a map at a fraction in 0..1. */
export function colorAt(map, fraction) {
  const position = Math.min(Math.max(fraction, 0), 1) * (map.length - 1);
  const low = Math.min(Math.floor(position), map.length - 2);
  const part = position - low;
  const [from, to] = [map[low], map[low + 1]];
  return [from[0] + part * (to[0] - from[0]), from[1] + part * (to[1] - from[1]), from[2] + part * (to[2] - from[2])];
}

export const cssColor = (map, fraction) => `rgb(${colorAt(map, fraction).map(Math.round).join(" ")})`;

// Images ----------------------------------------------------------------------------------------------------

/** Return an <image> of a matrix, one cell per value. `color(value)` returns [r, g, b]. */
export function matrixImage(values, rows, columns, box, color) {
  return pixelImage(rows, columns, box, (index) => color(values[index]));
}

/** Return an <image> of pixels [C, H, W] in 0..1, gray or colour. */
export function photo(data, shape, box, offset = 0) {
  const [channels, height, width] = shape;
  const next = channels === 3 ? height * width : 0;
  return pixelImage(height, width, box, (i) => [255 * data[offset + i], 255 * data[offset + next + i], 255 * data[offset + 2 * next + i]]);
}

// One canvas for all images: a context is expensive, and these are drawn ten times a second while a slider moves.
const canvas = document.createElement("canvas");
const context = canvas.getContext("2d", { willReadFrequently: true });

/** Return an <image> with the colour of each pixel given by a function of its index. */
export function pixelImage(rows, columns, [x, y, width, height], color) {
  canvas.width = columns;
  canvas.height = rows;
  const pixels = context.createImageData(columns, rows);
  const { data } = pixels;
  for (let i = 0, at = 0; at < data.length; i += 1, at += 4) {
    const rgba = color(i);
    data[at] = rgba[0];
    data[at + 1] = rgba[1];
    data[at + 2] = rgba[2];
    data[at + 3] = rgba[3] ?? 255;
  }
  context.putImageData(pixels, 0, 0);
  const image = s("image", { x, y, width, height, preserveAspectRatio: "none", "image-rendering": "pixelated" });
  image.setAttribute("href", canvas.toDataURL());
  image.style.imageRendering = "pixelated";
  return image;
}

// Pointing at things and selecting them ---------------------------------------------------------------------

/** Show a text while a node is pointed at, touched or focused; it may be a function of the position in 0..1. */
export function withTip(node, tip) {
  node.tip = tip;
  return node;
}

/** Show a text for each cell of an image: `describe(row, column)`. */
export const withCellTips = (node, rows, columns, describe) =>
  withTip(node, (x, y) => describe(Math.min(rows - 1, Math.floor(y * rows)), Math.min(columns - 1, Math.floor(x * columns))));

/** Return the attributes of a node that is selected by click, Enter or Space; `key` finds it again when it is redrawn. */
export const selectable = (key, label, select, pressed = null) => ({
  role: "button", tabindex: 0, "data-key": key, "aria-label": label, "aria-pressed": pressed === null ? null : String(pressed), onclick: select,
  onkeydown: (event) => {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      event.stopPropagation();
      select();
    }
  },
});

/** Create the element that shows the texts of `withTip`. */
export function createTip() {
  const root = h("div", { class: "tip", hidden: true, "aria-hidden": "true" });
  const show = (event) => {
    let node = event.target;
    while (node && !node.tip) node = node.parentNode;
    root.hidden = !node;
    if (!node) return;
    const box = node.getBoundingClientRect();
    const [x, y] = event.type === "focusin" ? [box.left, box.bottom] : [event.clientX, event.clientY];
    root.textContent = typeof node.tip === "function" ? node.tip((x - box.left) / box.width, (y - box.top) / box.height) : node.tip;
    root.style.left = `${Math.max(4, Math.min(x + 12, document.documentElement.clientWidth - root.offsetWidth - 4))}px`;
    root.style.top = `${y + 16 + root.offsetHeight > innerHeight ? y - root.offsetHeight - 12 : y + 16}px`;
  };
  for (const name of ["pointermove", "pointerdown", "focusin"]) document.addEventListener(name, show);
  for (const name of ["scroll", "keydown", "pointerleave"]) document.addEventListener(name, () => { root.hidden = true; });
  return root;
}

// Controls --------------------------------------------------------------------------------------------------

/** Return a labelled slider; `change` gets its number. */
export function slider(label, { min, max, step, value, change, unit = "", id }) {
  const output = h("output", {}, display(value, step, unit));
  const input = h("input", {
    type: "range", min, max, step, value, id, "aria-label": label,
    oninput: () => {
      output.textContent = display(Number(input.value), step, unit);
      change(Number(input.value));
    },
  });
  const root = h("label", { class: "slider" }, h("span", {}, label), input, output);
  root.set = (number) => {
    input.value = number;
    output.textContent = display(Number(input.value), step, unit);
  };
  return root;
}

function display(value, step, unit) {
  const digits = step >= 1 ? 0 : step >= 0.1 ? 1 : 2;
  return `${Number(value).toFixed(digits).replace(/^-(0\.?0*)$/, "$1").replace("-", "−")}${unit}`;
}

/** Return a labelled select; options are [value, text] pairs. */
export function select(label, options, value, change, id) {
  const input = h("select", { id, "aria-label": label, onchange: () => change(input.value) });
  for (const [key, name] of options) input.append(h("option", { value: key, selected: String(key) === String(value) }, name));
  const root = h("label", { class: "choice" }, h("span", {}, label), input);
  root.input = input;
  return root;
}

export const button = (label, click, attributes = {}) =>
  h("button", { type: "button", onclick: click, ...attributes }, label);
