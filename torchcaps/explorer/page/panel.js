// The frame of a panel: title, controls, one pane per run, and downloads.

import { downloadMenu } from "./download.js";
import { h } from "./dom.js";

const HIDDEN_DELAY_MS = 250;

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
  const menu = downloadMenu(title, () => panes.filter((pane) => !pane.reason).map((pane) => {
    const { name } = ctx.info.runs[pane.index];
    const data = { panel: id, run: name, state: ctx.state.get(), result: definition.data(ctx, pane.index) };
    return { name: `${name}-${id}`, body: pane.root, data };
  }));
  const root = h(
    "section",
    { class: `panel${definition.wide || !usable ? " wide" : ""}${usable ? "" : " missing"}`, id: `panel-${id}`, "aria-labelledby": `title-${id}` },
    h("header", {}, h("h2", { id: `title-${id}` }, title), usable ? menu : null),
    usable ? h("p", { class: "about" }, about) : null,
    usable ? controls : null,
    h("div", { class: "panes" }, panes.map((pane) => pane.root)),
  );
  const panel = { id, root, panes, definition, version: 0, busy: false, isVisible: true };
  new IntersectionObserver(([entry]) => { panel.isVisible = entry.isIntersecting; }).observe(root);
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
    // While the input moves, only the panels on the screen follow; the others are drawn when it rests.
    for (let waited = 0; !panel.isVisible && waited !== panel.version;) {
      waited = panel.version;
      await new Promise((resolve) => { setTimeout(resolve, HIDDEN_DELAY_MS); });
    }
    drawn = panel.version;
    for (const pane of panel.panes) {
      if (pane.reason || !ctx.results[pane.index]) continue;
      try {
        const node = await panel.definition.draw(ctx, pane.index);
        if (node) replace(pane.body, node);
      } catch (error) {
        pane.body.replaceChildren(h("p", { class: "reason" }, sentence(error)));
      }
    }
  }
  panel.busy = false;
}

/** Replace the content of a pane; what was open stays open, and what had the focus keeps it. */
function replace(body, node) {
  const open = [...body.querySelectorAll("details[open] > summary")].map((summary) => summary.textContent);
  const focused = body.contains(document.activeElement) ? keyOf(document.activeElement) : null;
  body.replaceChildren(node);
  for (const details of body.querySelectorAll("details")) if (open.includes(details.firstChild.textContent)) details.open = true;
  if (focused) [...body.querySelectorAll("[tabindex], summary")].find((element) => keyOf(element) === focused)?.focus({ preventScroll: true });
}

const keyOf = (element) => element.dataset.key ?? (element.tagName === "SUMMARY" ? element.textContent : null);

export const sentence = (error) => {
  const message = String(error.message ?? error);
  return message.charAt(0).toUpperCase() + message.slice(1) + (message.endsWith(".") ? "" : ".");
};
