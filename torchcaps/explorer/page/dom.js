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
  root.append(s("title", {}, label), ...children.flat(3).filter(Boolean));
  return root;
}

export const text = (x, y, content, attributes = {}) => s("text", { x, y, ...attributes }, content);

/** Format a number for people: three digits after the point, or an exponent. */
export function format(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 10 ** -digits || size >= 1e5)) return value.toExponential(1);
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
  return map[low].map((value, channel) => value + part * (map[low + 1][channel] - value));
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
  const plane = height * width;
  return pixelImage(height, width, box, (i) =>
    [0, 1, 2].map((c) => 255 * data[offset + (channels === 3 ? c : 0) * plane + i]),
  );
}

/** Return an <image> with the colour of each pixel given by a function of its index. */
export function pixelImage(rows, columns, [x, y, width, height], color) {
  const canvas = document.createElement("canvas");
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(columns, rows);
  for (let i = 0; i < rows * columns; i += 1) {
    const [red, green, blue, alpha = 255] = color(i);
    pixels.data.set([red, green, blue, alpha], 4 * i);
  }
  context.putImageData(pixels, 0, 0);
  const image = s("image", { x, y, width, height, preserveAspectRatio: "none", "image-rendering": "pixelated" });
  image.setAttribute("href", canvas.toDataURL());
  image.style.imageRendering = "pixelated";
  return image;
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
  return `${Number(value).toFixed(digits).replace("-", "−")}${unit}`;
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
