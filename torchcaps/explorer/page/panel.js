// The frame of a panel: title, controls, one pane per run, and downloads as PNG, SVG and JSON.

import { button, h } from "./dom.js";

/**
 * Create a panel.
 *
 * definition: {id, title, about, needs, wide, controls(ctx), draw(ctx, run), data(ctx, run)}; `needs` names a part of
 * the model; without it the panel is one line with the reason. `draw` returns a node or a promise of one.
 */
export function createPanel(ctx, definition) {
  const { id, title, about, needs } = definition;
  const panes = ctx.info.runs.map((run, index) => createPane(ctx, run, index, needs));
  const controls = h("div", { class: "controls" });
  const usable = panes.some((pane) => !pane.reason);
  const menu = h("details", { class: "menu" }, h("summary", { "aria-label": `Download: ${title}`, title: "Download" }, "⤓"));
  const root = h(
    "section",
    { class: `panel${definition.wide ? " wide" : ""}`, id: `panel-${id}`, "aria-labelledby": `title-${id}` },
    h("header", {}, h("h2", { id: `title-${id}` }, title), usable ? menu : null),
    usable ? h("p", { class: "about" }, about) : null,
    usable ? controls : null,
    h("div", { class: "panes" }, panes.map((pane) => pane.root)),
  );
  const panel = { id, root, panes, definition, version: 0, busy: false };
  menu.append(
    h("div", { class: "items" },
      button("PNG", () => download(ctx, panel, "png", menu)),
      button("SVG", () => download(ctx, panel, "svg", menu)),
      button("JSON", () => download(ctx, panel, "json", menu))),
  );
  if (usable && definition.controls) controls.append(...definition.controls(ctx).filter(Boolean));
  panel.redraw = () => redraw(ctx, panel);
  return panel;
}

function createPane(ctx, run, index, needs) {
  const reason = needs ? run.missing[needs] : "";
  const body = h("div", { class: "body" }, reason ? h("p", { class: "reason" }, reason) : null);
  const name = ctx.info.runs.length > 1 ? h("h3", {}, run.name) : null;
  return { root: h("div", { class: "pane" }, name, body), body, index, reason };
}

async function redraw(ctx, panel) {
  panel.version += 1;
  if (panel.busy) return; // the run below starts again with the newest state
  panel.busy = true;
  let drawn = 0;
  while (drawn !== panel.version) {
    drawn = panel.version;
    for (const pane of panel.panes) {
      if (pane.reason || !ctx.results[pane.index]) continue;
      try {
        const node = await panel.definition.draw(ctx, pane.index);
        if (node) pane.body.replaceChildren(node);
      } catch (error) {
        pane.body.replaceChildren(h("p", { class: "reason" }, sentence(error)));
      }
    }
  }
  panel.busy = false;
}

export const sentence = (error) => {
  const message = String(error.message ?? error);
  return message.charAt(0).toUpperCase() + message.slice(1) + (message.endsWith(".") ? "" : ".");
};

// Downloads -------------------------------------------------------------------------------------------------

async function download(ctx, panel, kind, menu) {
  menu.open = false;
  for (const pane of panel.panes) {
    if (pane.reason) continue;
    const name = `${ctx.info.runs[pane.index].name}-${panel.id}`.replaceAll(/[^\w.-]+/g, "_");
    if (kind === "json") {
      const data = { panel: panel.id, run: ctx.info.runs[pane.index].name, state: ctx.state.get() };
      data.result = panel.definition.data(ctx, pane.index);
      save(new Blob([JSON.stringify(data, null, 1)], { type: "application/json" }), `${name}.json`);
      continue;
    }
    const drawings = [...pane.body.querySelectorAll("svg.drawing")];
    for (const [n, svg] of drawings.entries()) {
      const text = standalone(svg);
      const file = drawings.length > 1 ? `${name}-${n + 1}` : name;
      if (kind === "svg") save(new Blob([text], { type: "image/svg+xml" }), `${file}.svg`);
      else save(await rasterize(text, svg.viewBox.baseVal), `${file}.png`);
    }
  }
}

function save(blob, name) {
  const url = URL.createObjectURL(blob);
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

const COPIED = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-opacity", "fill-opacity", "opacity",
  "font-size", "font-family", "font-weight", "text-anchor", "dominant-baseline"];

/** Return a drawing as an SVG file: styles of the page become attributes, and the panel's colour its background. */
export function standalone(svg) {
  const copy = svg.cloneNode(true);
  const originals = [svg, ...svg.querySelectorAll("*")];
  const copies = [copy, ...copy.querySelectorAll("*")];
  originals.forEach((original, n) => {
    const style = getComputedStyle(original);
    for (const name of COPIED) {
      const value = style.getPropertyValue(name);
      if (value) copies[n].setAttribute(name, value);
    }
  });
  const { width, height } = svg.viewBox.baseVal;
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("width", width);
  copy.setAttribute("height", height);
  const background = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  background.setAttribute("width", width);
  background.setAttribute("height", height);
  background.setAttribute("fill", getComputedStyle(svg.closest(".panel") ?? document.body).backgroundColor);
  copy.prepend(background);
  return new XMLSerializer().serializeToString(copy);
}

async function rasterize(text, { width, height }, scale = 3) {
  const image = new Image();
  const url = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
  image.src = url;
  await image.decode();
  const canvas = h("canvas", { width: width * scale, height: height * scale });
  canvas.getContext("2d").drawImage(image, 0, 0, width * scale, height * scale);
  URL.revokeObjectURL(url);
  return new Promise((resolve) => { canvas.toBlob(resolve, "image/png"); });
}
