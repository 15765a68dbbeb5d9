// Downloads of a panel as PNG, SVG and JSON. An SVG is what the page shows: drawings, and the text and lines of tables.

import { button, h, s } from "./dom.js";

const PADDING = 12;
const BASELINE = 0.78; // of the height of a line of text
const PNG_SCALE = 3;
const COPIED = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-opacity", "fill-opacity", "opacity",
  "font-size", "font-family", "font-weight", "text-anchor", "dominant-baseline"];

/** Return a menu that saves `parts()`: a list of {name, body, data}, with the drawn element and its numbers. */
export function downloadMenu(title, parts) {
  const menu = h("details", { class: "menu" }, h("summary", { "aria-label": `Download: ${title}`, title: "Download" }, "⤓"));
  async function download(kind) {
    menu.open = false;
    for (const { name, body, data } of parts()) {
      const file = `${name.replaceAll(/[^\w.-]+/g, "_")}.${kind}`;
      if (kind === "json") save(new Blob([JSON.stringify(data, null, 1)], { type: "application/json" }), file);
      else {
        const svg = drawElement(body);
        const text = new XMLSerializer().serializeToString(svg);
        save(kind === "svg" ? new Blob([text], { type: "image/svg+xml" }) : await rasterize(text, svg.viewBox.baseVal), file);
      }
    }
  }
  menu.append(h("div", { class: "items" }, ["PNG", "SVG", "JSON"].map((kind) => button(kind, () => download(kind.toLowerCase())))));
  return menu;
}

function save(blob, name) {
  const url = URL.createObjectURL(blob);
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** Return an element of the page as one SVG that needs no style sheet; what is not visible is left out. */
export function drawElement(element) {
  const frame = element.getBoundingClientRect();
  const at = (box) => ({ x: box.left - frame.left + PADDING, y: box.top - frame.top + PADDING });
  const nodes = [];
  let [right, bottom] = [0, 0];
  const add = (box, ...created) => {
    nodes.push(...created);
    right = Math.max(right, box.right - frame.left);
    bottom = Math.max(bottom, box.bottom - frame.top);
  };
  function visit(node) {
    if (node.nodeType === Node.TEXT_NODE) {
      const { color, fontSize, fontFamily, fontWeight } = getComputedStyle(node.parentNode);
      for (const [word, box] of words(node)) {
        add(box, s("text", { x: at(box).x, y: at(box).y + BASELINE * box.height, fill: color, "font-size": fontSize, "font-family": fontFamily, "font-weight": fontWeight }, word));
      }
      return;
    }
    const box = node.getBoundingClientRect();
    if (!box.width || !box.height) return;
    const size = { ...at(box), width: box.width, height: box.height };
    if (node.tagName === "svg") add(box, copyDrawing(node, size));
    else if (node.tagName === "CANVAS") add(box, s("image", { ...size, href: node.toDataURL(), "image-rendering": "pixelated", preserveAspectRatio: "none" }));
    else {
      const { backgroundColor, borderBottomWidth, borderBottomColor } = getComputedStyle(node);
      if (node !== element && !/, 0\)$/.test(backgroundColor)) add(box, s("rect", { ...size, fill: backgroundColor }));
      if (["TH", "TD"].includes(node.tagName) && parseFloat(borderBottomWidth)) {
        add(box, s("rect", { ...size, y: size.y + box.height - 1, height: 1, fill: borderBottomColor }));
      }
      for (const child of node.childNodes) visit(child);
    }
  }
  visit(element);
  const [width, height] = [Math.ceil(right + 2 * PADDING), Math.ceil(bottom + 2 * PADDING)];
  const background = getComputedStyle(element.closest(".panel") ?? document.body).backgroundColor;
  return s("svg", { xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `0 0 ${width} ${height}` }, s("rect", { width, height, fill: background }), nodes);
}

/** Return the words of a text node with their boxes, those that are visible. */
function words(node) {
  const range = document.createRange();
  return [...node.data.matchAll(/\S+/g)].map((match) => {
    range.setStart(node, match.index);
    range.setEnd(node, match.index + match[0].length);
    return [match[0], range.getBoundingClientRect()];
  }).filter(([, box]) => box.width && box.height);
}

/** Return a copy of a drawing at a place, with the styles of the page as attributes. */
function copyDrawing(svg, size) {
  const copy = svg.cloneNode(true);
  const originals = [svg, ...svg.querySelectorAll("*")];
  const copies = [copy, ...copy.querySelectorAll("*")];
  originals.forEach((original, n) => {
    const style = getComputedStyle(original);
    for (const name of COPIED) {
      const value = style.getPropertyValue(name);
      if (value) copies[n].setAttribute(name, value);
    }
    for (const name of ["class", "tabindex", "role", "aria-pressed", "data-key"]) copies[n].removeAttribute(name);
  });
  for (const [name, value] of Object.entries(size)) copy.setAttribute(name, value);
  return copy;
}

async function rasterize(text, { width, height }) {
  const image = new Image();
  const url = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
  image.src = url;
  await image.decode();
  const canvas = h("canvas", { width: width * PNG_SCALE, height: height * PNG_SCALE });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  URL.revokeObjectURL(url);
  return new Promise((resolve) => { canvas.toBlob(resolve, "image/png"); });
}
