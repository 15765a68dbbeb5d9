// The page: loads the description of the runs, creates the panels, and recomputes what the state changes.

import { FileBackend, ServerBackend, coalesce } from "./backend.js";
import { classesPanel } from "./classes.js";
import { couplingsPanel } from "./couplings.js";
import { creditPanel } from "./credit.js";
import { decoderPanel } from "./decoder.js";
import { button, createTip, h } from "./dom.js";
import { equationPanel } from "./equation.js";
import { createInput } from "./input.js";
import { iterationsPanel } from "./iterations.js";
import { createPanel, sentence } from "./panel.js";
import { primaryPanel } from "./primary.js";
import { INPUT_FIELDS, createState, imageOf } from "./state.js";
import { statsPanel } from "./stats.js";
import { SEVEN, startTour } from "./tour.js";
import { trainingPanel } from "./training.js";
import { treePanel } from "./tree.js";

const PANELS = [classesPanel, couplingsPanel, decoderPanel, treePanel, primaryPanel, iterationsPanel, creditPanel, equationPanel, statsPanel, trainingPanel];
// Panels that depend on the state besides the results of the forward pass.
const DEPENDS = {
  target: ["classes", "couplings", "decoder", "tree", "credit", "equation"], offsets: ["decoder"], kept: ["decoder"], walk: ["decoder"],
  parent: ["couplings", "equation"], t: ["couplings", "iterations", "equation"], layer: ["couplings", "iterations", "equation"], view: ["couplings"],
  type: ["primary"], threshold: ["tree"],
};
const INDEPENDENT = ["stats", "training"]; // of the input

async function start() {
  const embedded = document.getElementById("data");
  const backend = embedded ? new FileBackend(JSON.parse(embedded.textContent)) : new ServerBackend();
  const info = await backend.info();
  const ctx = createContext(backend, info);
  if (backend.isFile && !backend.data.order.includes(ctx.state.get().source.sample)) ctx.state.set({ source: { sample: backend.data.order[0] } });
  document.getElementById("root").replaceChildren(createHeader(ctx), h("main", { class: info.runs.length > 1 ? "compared" : null }, createInput(ctx), createPanels(ctx)), createTip());
  document.title = `${info.runs.map((run) => run.name).join(" and ")} · torchcaps explorer`;
  listenToKeys(ctx);
  if (info.runs[0].missing.samples && "sample" in ctx.state.get().source) ctx.sketch.load(SEVEN); // something to look at
  const compute = coalesce(async () => {
    ctx.computing = true;
    await forward(ctx);
    ctx.computing = false;
  });
  ctx.state.subscribe((changed) => {
    if (INPUT_FIELDS.some((field) => changed.has(field))) compute();
    const panels = new Set([...changed].flatMap((field) => DEPENDS[field] ?? []));
    if (panels.size && ctx.results[0]) for (const listener of ctx.listeners) listener();
    for (const id of panels) ctx.redraw(id);
  });
  window.addEventListener("hashchange", () => ctx.state.reload());
  await compute();
  for (const id of INDEPENDENT) ctx.redraw(id);
}

function createContext(backend, info) {
  const ctx = {
    backend, info, state: createState(), results: info.runs.map(() => null), version: 0, computing: false, listeners: [], panels: {}, actions: {},
    decoded: [], credits: [], parents: [], statistics: [], training: [], onResults: (listener) => ctx.listeners.push(listener),
    redraw: (id) => ctx.panels[id]?.redraw(),
    whenStatisticsReady(run) {
      if (run === 0 && !ctx.sorted) {
        ctx.sorted = true;
        ctx.actions.reloadSamples?.();
      }
    },
  };
  window.explorer = ctx; // for the console, and for tests
  return ctx;
}

/** Run all networks on the current input, then update everything that depends on it. */
async function forward(ctx) {
  const state = ctx.state.get();
  const message = document.getElementById("message");
  try {
    const request = () => Promise.all(ctx.info.runs.map((run, index) => {
      const sites = run.layers.map((_, n) => siteOf(ctx, index, n));
      return ctx.backend.forward({ run: index, image: imageOf(state), iterations: state.iterations, sites });
    }));
    const isFirst = !ctx.results[0];
    ctx.results = await request();
    if (isFirst && state.site) ctx.results = await request(); // of a link: now the grids are known
  } catch (error) {
    message.textContent = sentence(error);
    return;
  }
  ctx.version += 1;
  document.body.dataset.version = ctx.version;
  const names = (run, indices) => indices.map((index) => ctx.info.runs[run].classes[index]).join(" and ") || "no class";
  const predicted = ctx.results.map((result, run) => `${ctx.info.runs.length > 1 ? `${ctx.info.runs[run].name}: ` : ""}${names(run, result.predicted)}`);
  const { labels } = ctx.results[0];
  message.textContent = `Predicted: ${predicted.join(" · ")}${labels ? ` · label: ${names(0, labels)}` : ""}`;
  for (const listener of ctx.listeners) listener();
  for (const id of Object.keys(ctx.panels)) if (!INDEPENDENT.includes(id)) ctx.redraw(id);
}

/** Widen each panel that would stand alone in a row of two. */
function fillRows(panels) {
  let row = 0;
  panels.forEach((panel, n) => {
    if (panel.classList.contains("wide")) return;
    row += 1;
    const next = panels[n + 1];
    if (next && !next.classList.contains("wide")) return;
    if (row % 2) panel.classList.add("wide");
    row = 0;
  });
}

/** Return row and column of the parents to trace, or null: the other run may have another grid. */
function siteOf(ctx, run, layer) {
  const { layer: chosen, site } = ctx.state.get();
  const sites = ctx.results[run]?.layers[layer]?.sites;
  if (!site || !sites || layer !== (chosen ?? ctx.info.runs[run].layers.length - 1)) return null;
  return site[0] >= sites[0] || site[1] >= sites[1] ? null : site;
}

function createPanels(ctx) {
  const root = h("div", { class: "panels" });
  for (const definition of PANELS) {
    const panel = createPanel(ctx, definition);
    ctx.panels[definition.id] = panel;
    root.append(panel.root);
  }
  fillRows([...root.children]);
  return root;
}

function createHeader(ctx) {
  const share = button("Share", async () => {
    try {
      await navigator.clipboard.writeText(ctx.state.link());
      share.textContent = "Link copied";
    } catch {
      location.hash = new URL(ctx.state.link()).hash;
      share.textContent = "See address";
    }
    setTimeout(() => { share.textContent = "Share"; }, 1500);
  }, { id: "share", title: "Copy a link to this state" });
  const theme = button("Dark", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"), { id: "theme" });
  function setTheme(name) {
    document.documentElement.dataset.theme = name;
    theme.textContent = name === "dark" ? "Light" : "Dark";
    for (const panel of Object.values(ctx.panels)) panel.redraw();
  }
  setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  const runs = ctx.info.runs.map((run) => h("span", { class: "run" }, h("b", {}, run.name), ` ${run.model === run.name ? run.weights : run.model}, ${run.parameters.toLocaleString("en")} parameters`));
  return h("header", { class: "top" },
    h("h1", {}, "torchcaps", h("span", {}, " explorer")), h("div", { class: "runs" }, runs),
    h("nav", { "aria-label": "Page" }, button("Tour", () => startTour(ctx), { id: "tour" }), share, theme, button("Keys", showKeys, { id: "keys" })));
}

// Keys ------------------------------------------------------------------------------------------------------

const KEYS = [["← →", "previous or next test image"], [", .", "previous or next routing iteration"], ["p", "play the iterations"],
  ["d", "draw"], ["s", "samples"], ["c", "clear the drawing"], ["r", "reset the placement"], ["t", "tour"], ["?", "this list"]];

function showKeys() {
  const dialog = h("dialog", { class: "keys", "aria-label": "Keys" }, h("h2", {}, "Keys"),
    h("dl", {}, KEYS.map(([key, text]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, text)])),
    h("form", { method: "dialog" }, h("button", { class: "primary" }, "Close")));
  dialog.querySelector("form").addEventListener("submit", (event) => { event.preventDefault(); dialog.close(); });
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

function listenToKeys(ctx) {
  const { actions, state, sketch } = ctx;
  const commands = {
    ArrowRight: () => actions.next?.(1), ArrowLeft: () => actions.next?.(-1), ".": () => actions.step?.(1), ",": () => actions.step?.(-1),
    p: () => actions.play?.(), d: () => !ctx.backend.isFile && actions.tab("draw"), s: () => actions.tab("pick"), c: () => !ctx.backend.isFile && sketch.clear(),
    r: () => state.set({ placement: { rotation: 0, scale: 1, shear: 0, right: 0, down: 0 } }), t: () => startTour(ctx), "?": showKeys,
  };
  document.addEventListener("keydown", (event) => {
    const typing = ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName);
    if (typing || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    const command = commands[event.key];
    if (command) {
      event.preventDefault();
      command();
    }
  });
}

start().catch((error) => {
  document.getElementById("root").replaceChildren(h("p", { class: "reason", role: "alert" }, `The page could not start: ${error.message}`));
});
